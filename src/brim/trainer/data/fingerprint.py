"""One name for sequences: the same bytes, read, tokenised and cut in the same way, on any machine and under any path."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from brim.workload.formats import told_as_ours

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from brim.trainer.data.encoding import Encoder
    from brim.workload.reading import Rows

_FORMAT: Final = 2
"""Of the sequences and their files: another number, and everything is made anew."""
_BYTES_AT_ONCE: Final = 1 << 20


def fingerprint(rows: Rows, encoder: Encoder, settings: Mapping[str, Any]) -> str:
    """Of the bytes of all files, of the tokenizer and of these settings, which are plain values. `encoder` is ready."""
    found = hashlib.blake2b(digest_size=16)
    for part in (_FORMAT, settings, rows.kinds, _tokenizer(encoder)):
        _add(found, json.dumps(part, sort_keys=True, default=str).encode())
    for file in rows.files:
        _add(found, _digest(file))
    return found.hexdigest()


def _add(found: Any, part: bytes) -> None:
    found.update(len(part).to_bytes(8, "little") + part)


def _digest(file: Path) -> bytes:
    found = hashlib.blake2b(digest_size=32)
    with told_as_ours(file), file.open("rb") as stream:
        while part := stream.read(_BYTES_AT_ONCE):
            found.update(part)
    return found.digest()


def _tokenizer(encoder: Encoder) -> dict[str, Any]:
    tokenizer = encoder.tokenizer
    whole = encoder.fast.to_str() if encoder.fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "words": hashlib.blake2b(whole.encode("utf-8", "surrogatepass")).hexdigest(),
        "kind": "fast" if encoder.fast is not None else type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "around": [encoder.leading, encoder.trailing, encoder.target_trailing, encoder.end],
        "template": tokenizer.chat_template,
    }
