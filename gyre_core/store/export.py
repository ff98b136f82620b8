"""A store's tables for other programs: JSON lines, or a folder that Hugging Face `datasets` loads.

Enters: a store, a folder that is not there yet (or empty). Leaves: each table's committed rows, once, in commit order.

- `jsonl`: `<table>.jsonl`, one object a row; maps as objects.
- `hf`: `<table>/train-00000-of-00002.parquet` and a README.md whose header names each table as a configuration, so that
  `datasets.load_dataset(folder, "nodes")` finds it; pandas and DuckDB read the same files. Maps become lists of
  key-value pairs, which `datasets` knows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from gyre_core.errors import StoreError
from gyre_core.store.manifest import ObjectRef
from gyre_core.store.schema import SCHEMAS
from gyre_core.store.store import Store

Format = Literal["jsonl", "hf"]
_SHARD_BYTES = 256 * 2**20  # of a table in memory, in one file of the hf layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written.

    Example: export(store, Path("out"), "hf").rows["nodes"]
    """

    files: tuple[str, ...]  # relative to the folder
    rows: dict[str, int]  # by table


def export(store: Store, folder: Path, form: Format) -> ExportReport:
    """Write every table that has rows; StoreError when the folder holds something already."""
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{folder} is not empty; name a folder that does not exist yet")
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    rows: dict[str, int] = {}
    for name in SCHEMAS:
        written, count = _export_table(store, name, folder, form)
        if count:
            files += written
            rows[name] = count
    if form == "hf":
        (folder / "README.md").write_text(_card(store, rows), encoding="utf-8")
        files.append("README.md")
    return ExportReport(files=tuple(files), rows=rows)


def table_rows(store: Store, name: str) -> Iterator[pa.Table]:
    """A table's committed rows, each once: one piece an object, in commit order."""
    seen: set[str] = set()
    for of, ref in _committed(store):
        if of == name and ref.key not in seen:
            seen.add(ref.key)
            yield store.read_object(name, ref)


def _committed(store: Store) -> Iterator[tuple[str, ObjectRef]]:
    store.refresh()
    yield from store.ledger.committed_objects()


def _export_table(store: Store, name: str, folder: Path, form: Format) -> tuple[list[str], int]:
    pieces = (piece for piece in table_rows(store, name) if piece.num_rows)
    if form == "jsonl":
        return _write_jsonl(name, pieces, folder)
    return _write_shards(name, pieces, folder)


def _write_jsonl(name: str, pieces: Iterator[pa.Table], folder: Path) -> tuple[list[str], int]:
    maps = [field.name for field in SCHEMAS[name] if pa.types.is_map(field.type)]
    count = 0
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for piece in pieces:
            for batch in piece.to_batches(max_chunksize=256):  # a batch of rows at a time as Python objects
                for row in batch.to_pylist():
                    row.update((column, dict(row[column])) for column in maps)
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
    if not count:
        path.unlink()
    return [path.name], count


def _write_shards(name: str, pieces: Iterator[pa.Table], folder: Path) -> tuple[list[str], int]:
    drafts: list[Path] = []
    count = 0
    for shard in _shards(pieces):
        (folder / name).mkdir(exist_ok=True)
        draft = folder / name / f"{len(drafts)}.draft"
        pq.write_table(_without_maps(shard), draft, compression="zstd", use_dictionary=False)
        drafts.append(draft)
        count += shard.num_rows
    files = []
    for index, draft in enumerate(drafts):  # names hold the number of shards, known only now
        final = draft.with_name(f"train-{index:05d}-of-{len(drafts):05d}.parquet")
        draft.rename(final)
        files.append(f"{name}/{final.name}")
    return files, count


def _shards(pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for piece in pieces:
        held.append(piece)
        if sum(one.nbytes for one in held) >= _SHARD_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _without_maps(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        if pa.types.is_map(field.type):
            pair = pa.struct([("key", field.type.key_type), ("value", field.type.item_type)])
            chunks = [
                pa.ListArray.from_arrays(
                    chunk.offsets, pa.StructArray.from_arrays([chunk.keys, chunk.items], fields=list(pair))
                )
                for chunk in table.column(index).chunks
            ]
            column = pa.chunked_array(chunks, pa.list_(pair))
            table = table.set_column(index, pa.field(field.name, column.type), column)
    return table


def _card(store: Store, rows: dict[str, int]) -> str:
    configs = "\n".join(
        f"  - config_name: {name}\n    data_files:\n      - split: train\n        path: {name}/*.parquet"
        for name in rows
    )
    columns = "\n\n".join(
        f"### {name}\n\n{count:,} rows\n\n"
        + "\n".join(f"- `{field.name}`: {field.type}" for field in _without_maps(SCHEMAS[name].empty_table()).schema)
        for name, count in rows.items()
    )
    return (
        f"---\nconfigs:\n{configs}\ntags:\n  - reinforcement-learning\n  - gyre\n---\n\n# Rollouts of a Gyre run\n\n"
        f"Exported after {store.head + 1} commits. Tables join on `rollout_id`. A node's tokens are those it adds to\n"
        "its parent's: a call's prompt and output are the nodes on the path from the root to its `node_id`.\n"
        "`mask_runs` are the lengths of not-sampled, sampled, not-sampled, ... runs; `logprobs` are of the sampled\n"
        "tokens only.\n\n"
        f"{columns}\n"
    )
