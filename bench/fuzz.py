"""Fuzzes the protocol room for a while: every message of a client, in every state of a session.

    make fuzz SECONDS=600

Coverage-guided, by atheris (the extra `fuzz`). A case that raises, or takes over 50 ms, ends the
run with exit status 1 and lies in build/fuzz/; cases of use go to tests/protocol/corpus/, which
the tests replay.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "protocol" / "corpus"
MAX_CASE_BYTES = 4096
MAX_RSS_MIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="fuzz protocol/ for a while")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--max-bytes", type=int, default=MAX_CASE_BYTES, help="length of a case")
    parser.add_argument("--found", type=Path, default=ROOT / "build" / "fuzz", help="a folder")
    args = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        raise SystemExit("atheris is not installed: pip install -e '.[fuzz]'") from None
    with atheris.instrument_imports(include=["protocol"]):
        exchange = importlib.import_module("tests.protocol.exchange")

    def try_case(case: bytes) -> None:
        seconds = exchange.seconds_of(case)
        if seconds > exchange.MAX_SECONDS:
            raise TimeoutError(f"a case of {len(case)} bytes took {seconds:.3f} s")

    corpus = args.found / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    words = args.found / "words.txt"
    words.write_text("".join(f'"{word}"\n' for word in _words(exchange)))
    options = [
        f"-max_total_time={args.seconds}",
        f"-max_len={args.max_bytes}",
        f"-rss_limit_mb={MAX_RSS_MIB}",
        f"-dict={words}",
        f"-artifact_prefix={args.found}/",
        "-print_final_stats=1",
        "-timeout=10",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(CORPUS)], try_case)
    atheris.Fuzz()


def _words(exchange: object) -> list[str]:
    """Names and marks of the wire, as libFuzzer's dictionary spells them."""
    codec = importlib.import_module("protocol.codec")
    names = set(codec.CLIENT_FRAMES)
    for frame in codec.CLIENT_FRAMES.values():
        names |= set(frame.__struct_fields__)
    quoted = [f'\\"{name}\\"' for name in sorted(names)]
    separator: bytes = exchange.SEPARATOR  # type: ignore[attr-defined]
    marks = [f"\\x{separator[0]:02x}T{{", f"\\x{separator[0]:02x}B\\x01\\x00\\x00\\x00\\x00\\x00{{"]
    values = ['\\"chunked\\"', '\\"grapheme\\"', '\\"sha256\\"', "\\\\ud800", "NaN", "-1", "1e999"]
    return [
        *quoted,
        *marks,
        *values,
        '{\\"role\\":\\"user\\",\\"content\\":\\"x\\"}',
        "true",
        "null",
    ]


if __name__ == "__main__":
    main()
