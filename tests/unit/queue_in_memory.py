"""TransferQueue's calls on a dictionary: the real one needs processes of Ray's."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import BatchMeta, KVBatchMeta


class Queue:
    """In place of the module ``transfer_queue``; rows by key, with what each of their fields holds."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        rows = [self.rows[key] for key in keys]
        everywhere = set.intersection(*map(set, rows))
        names = set.union(*map(set, rows)) if select_fields is None else set(select_fields) & set.union(*map(set, rows))
        if names - everywhere:
            raise ValueError("Some fields are not ready in all the requested keys!")
        return TensorDict({name: _column([row[name] for row in rows]) for name in sorted(names)}, [len(keys)])

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict, tags: list[dict[str, Any]] | None = None
    ) -> KVBatchMeta:
        for index, key in enumerate(keys):
            row = self.rows.setdefault(key, {})
            for name in [*fields.keys()]:
                value = fields[name]
                row[name] = value.unbind()[index] if torch.is_tensor(value) else list(value)[index]
        names = sorted(set.intersection(*(set(self.rows[key]) for key in keys)))
        self.tags |= dict(zip(keys, tags, strict=True)) if tags else {}
        return KVBatchMeta(keys, [self.tags.get(key, {}) for key in keys], partition_id, names)

    def get_client(self) -> Queue:
        return self

    def kv_retrieve_meta(self, keys: list[str], partition_id: str) -> BatchMeta:
        columns = self.kv_batch_get(keys, partition_id)
        schema = {name: {"is_non_tensor": not torch.is_tensor(columns[name])} for name in columns.keys()}  # noqa: SIM118
        return BatchMeta([*range(len(keys))], [partition_id] * len(keys), schema)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key]


def _column(values: list[Any]) -> Any:
    if torch.is_tensor(values[0]):
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return NonTensorStack(*values)
