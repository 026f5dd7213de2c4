"""How long Python's tokenizers takes for the text files of a folder: python tokenizers_speed.py TOKENIZER_JSON FOLDER

Files are read and encoded in batches, by all cores; nothing is written. Prints the seconds.
"""

import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "true"
from tokenizers import Tokenizer  # noqa: E402

BATCH_BYTES = 16 << 20


def texts(folder):
    for path, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            full = os.path.join(path, name)
            if os.path.islink(full):
                continue
            with open(full, "rb") as file:
                data = file.read()
            if b"\0" not in data:
                yield data.decode("utf-8", errors="replace")


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    started, tokens, batch, size = time.time(), 0, [], 0
    for text in texts(sys.argv[2]):
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
            batch, size = [], 0
    if batch:
        tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
    print(f"{tokens} tokens", file=sys.stderr)
    print(time.time() - started)


main()
