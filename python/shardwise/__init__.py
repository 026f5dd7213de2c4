"""Train large transformer models with Shardwise, from Python.

Everything here runs the program ``shardwise``, which is installed with this package, and reads the files that it writes. No Python runs
while a model is trained.

    >>> import shardwise
    >>> shardwise.program().name
    'shardwise'

Train from a recipe, and look at the steps as they are done::

    for step in shardwise.train("recipe.toml", ranks=2):
        print(step["step"], step["loss"])

Afterwards, or while another process trains, read all of them, for example into pandas::

    pandas.DataFrame(shardwise.load_metrics("runs/recipe"))
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union

from ._toml import to_toml, to_value

__all__ = ["Error", "export", "import_", "load_metrics", "program", "to_toml", "train"]

Recipe = Union[str, "os.PathLike[str]", Mapping[str, Any]]
Record = dict[str, Any]

_POLL_S = 0.1


class Error(RuntimeError):
    """``shardwise`` failed. ``code`` is its exit code: 2 for a wrong recipe, 75 if the run was saved and should be started again."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def program() -> Path:
    """The program ``shardwise``, next to the Python that runs this."""
    folders = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    # pip install --user: in the bin folder above site-packages.
    folders += [parent / "bin" for parent in Path(__file__).parents]
    for folder in folders:
        if (folder / "shardwise").is_file():
            return folder / "shardwise"
    raise FileNotFoundError("the program shardwise is not installed next to this package: run pip install --force-reinstall shardwise")


def train(recipe: Recipe, ranks: int | None = None, *, folder: str | os.PathLike[str] | None = None, set: Mapping[str, Any] | None = None) -> Iterator[Record]:
    """Trains, and yields a record for each step that is done: its number, loss, learning rate, throughput, memory.

    ``recipe`` is the path of a recipe, or a mapping with the same tables and keys; paths in a mapping are relative to the current folder.
    ``folder`` is where the run keeps its metrics (``run.folder``); a mapping needs one. ``set`` changes keys of the recipe:
    ``{"optimizer.lr": 1e-3}``. What the program prints goes to standard error.

    If the caller stops iterating, or presses Ctrl-C, the run stops, after a checkpoint if the recipe has ``checkpoints``. Raises `Error` if
    the run fails.
    """
    changes = dict(set or {})
    if folder is not None:
        changes["run.folder"] = os.path.abspath(folder)
    with _recipe_file(recipe, changes) as path:
        run = _run_folder(path, changes)
        metrics = run / "metrics.jsonl"
        # A run that is resumed appends to its file.
        done = metrics.stat().st_size if metrics.exists() else 0
        command = [program(), "train", path, *([] if ranks is None else ["-n", str(ranks)]), *_set_flags(changes)]
        printed = sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL
        # In a session of its own, Ctrl-C reaches it once, through this process.
        process = subprocess.Popen(command, stdout=printed, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            while True:
                ended = process.poll() is not None
                for record, done in _read_records(metrics, done):
                    if record.get("kind") == "step":
                        yield record
                if ended:
                    break
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                # It saves a checkpoint and stops.
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise Error(f"shardwise train ended with code {process.returncode}", process.returncode)


def load_metrics(folder: str | os.PathLike[str], kind: str = "step") -> list[Record]:
    """The records of a run, of one kind: ``step``, ``evaluation``, ``saved`` or ``memory``. ``pandas.DataFrame`` accepts them.

    Steps that were repeated after a failure are there once, as they were done last.
    """
    path = Path(folder) / "metrics.jsonl"
    records = [record for record, _ in _read_records(path, 0) if record.get("kind") == kind]
    if not records and not path.exists():
        raise FileNotFoundError(f"{path}: not the folder of a run")
    if kind == "step":
        records = sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])
    return records


def export(folder: str | os.PathLike[str], to: str | os.PathLike[str], *, step: int | None = None, dtype: str = "f32", force: bool = False) -> None:
    """Exports the parameters of a checkpoint in Hugging Face's format."""
    flags = ["--dtype", dtype, *(["--step", str(step)] if step is not None else []), *(["--force"] if force else [])]
    _run(["checkpoint", "export", os.fspath(folder), os.fspath(to), *flags])


def import_(model: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Imports a Hugging Face checkpoint as the checkpoint of step 0."""
    _run(["checkpoint", "import", os.fspath(model), os.fspath(folder)])


def _run(arguments: list[str]) -> str:
    done = subprocess.run([program(), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Error(done.stderr.strip().removeprefix("Error: ") or f"it ended with code {done.returncode}", done.returncode)
    return done.stdout


@contextlib.contextmanager
def _recipe_file(recipe: Recipe, changes: Mapping[str, Any]) -> Iterator[Path]:
    if not isinstance(recipe, Mapping):
        yield Path(recipe)
        return
    if "run.folder" not in changes and "folder" not in recipe.get("run", {}):
        raise ValueError("a recipe that is a mapping needs run.folder, or the argument folder")
    # In the current folder, because paths in a recipe are relative to its file.
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=".recipe-", suffix=".toml", dir=os.getcwd()) as file:
        file.write(to_toml(recipe))
        file.flush()
        yield Path(file.name)


def _run_folder(path: Path, changes: Mapping[str, Any]) -> Path:
    return Path(_run(["config", os.fspath(path), *_set_flags(changes), "--folder"]).rstrip("\n"))


def _set_flags(changes: Mapping[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value if isinstance(value, str) else to_value(value)}")]


def _read_records(path: Path, start: int) -> Iterator[tuple[Record, int]]:
    """The complete lines after ``start``, each with the position after it."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    # A line that a crash has cut short.
                    continue
                if isinstance(record, dict):
                    yield record, start
    except FileNotFoundError:
        return


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
        return True
    except Exception:
        return False
