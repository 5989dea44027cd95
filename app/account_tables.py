"""The tables of the account store.

tenants          their limits
api_keys         SHA-256 of each key; revoked ones stay
usage_days       what each tenant used, a row a day
usage_writers    the last batch of each ledger, so that none counts twice
account_revision one row that changes with tenants and keys
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Connection, ForeignKey, String, inspect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateIndex, CreateTable


class TableRow(DeclarativeBase):
    type_annotation_map = {int: BigInteger}  # noqa: RUF012  SQLAlchemy reads it off the class


class TenantRow(TableRow):
    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrent_requests: Mapped[int | None]


class KeyRow(TableRow):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"), index=True)
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(8))
    is_admin: Mapped[bool]
    created_at: Mapped[int]
    revoked_at: Mapped[int | None]


class UsageRow(TableRow):
    __tablename__ = "usage_days"

    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128), primary_key=True)
    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    saved_tokens: Mapped[int]


class WriterRow(TableRow):
    __tablename__ = "usage_writers"

    writer: Mapped[str] = mapped_column(String(32), primary_key=True)
    last_batch: Mapped[int]
    written_at: Mapped[int]


class RevisionRow(TableRow):
    __tablename__ = "account_revision"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[str] = mapped_column(String(32))


def create_missing(connection: Connection) -> None:
    """Only what is missing: somebody else may have made the tables, and granted no more than them."""
    present = set(inspect(connection).get_table_names())
    for table in TableRow.metadata.sorted_tables:
        if table.name not in present:
            connection.execute(CreateTable(table, if_not_exists=True))
            for index in table.indexes:
                connection.execute(CreateIndex(index, if_not_exists=True))
