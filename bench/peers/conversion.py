"""Prepares a model for the engines that have a format of their own; run by their own Python.

    PEERS/ctranslate2/bin/python -m bench.peers.conversion ctranslate2 --model FOLDER --out FOLDER
    PEERS/openvino/bin/python -m bench.peers.conversion openvino --model FOLDER --out FOLDER

A folder that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FORMATS = ("ctranslate2", "openvino")


def conversion_command(format_name: str, model: Path, out: Path) -> list[str]:
    """The converter's own command, from the same environment as this Python."""
    tools = Path(sys.executable).parent
    if format_name == "ctranslate2":
        return [
            str(tools / "ct2-transformers-converter"),
            "--model", str(model), "--quantization", "int8", "--output_dir", str(out), "--force",
        ]  # fmt: skip
    return [
        str(tools / "optimum-cli"), "export", "openvino",
        "--model", str(model), "--task", "text-generation-with-past",
        "--weight-format", "int8", str(out),
    ]  # fmt: skip


def convert(format_name: str, model: Path, out: Path) -> None:
    """Converts beside `out` and renames, so that half a model never has its name.

    Raises:
        subprocess.CalledProcessError: the converter failed; it has said why.
    """
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / "model"
        subprocess.run(conversion_command(format_name, model, made), check=True, stdout=sys.stderr)
        os.rename(made, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    convert(options.format, options.model, options.out)


if __name__ == "__main__":
    main()
