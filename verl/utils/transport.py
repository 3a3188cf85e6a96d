"""How tensors and arrays cross process borders without needless copies.

``pickle`` copies a torch tensor's *whole* storage through a byte stream, even for a slice of it. NumPy arrays travel
as out-of-band buffers (pickle protocol 5), which Ray's object store keeps in shared memory. :func:`pack` therefore
replaces every tensor of a structure by a carrier around a NumPy view of exactly its elements; unpickling a carrier
gives the tensor back.

Arrays that come out of the object store are read-only views of shared memory. Torch has no read-only tensors, and a
write would change what other processes read, so a read-only buffer is copied once when it is unpickled: one
``memcpy`` in the process that is going to use the data, and everything that arrives may be written to. Buffers that
arrive writable (in a plain pickle, for example) are used as they are. Whole numbers of a batch travel in the smallest
type that holds them.

What is not preserved: devices (tensors arrive on CPU), gradients and the sharing of storage between two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

#: types that hold no tensor; looked up first because most objects are of these
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


#: torch dtypes that NumPy lacks -> an integer dtype of the same size to view them as
_VIEW_AS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    **dict.fromkeys([getattr(torch, name) for name in dir(torch) if name.startswith("float8_")], torch.uint8),
}


#: id -> (object, its replacement)
_Memo = dict[int, tuple[Any, Any]]


class Carrier:
    """Stands for an object in a pickle; unpickling calls ``rebuild(*parts)``."""

    __slots__ = ("parts", "rebuild")

    def __init__(self, rebuild: Callable[..., Any], parts: tuple[Any, ...]) -> None:
        self.rebuild = rebuild
        self.parts = parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.rebuild, self.parts


def pack(obj: Any) -> Any:
    """Replace tensors, tensor dicts and arrays inside ``obj`` by carriers; anything else stays the same object.

    Looks into dicts, lists, tuples and object arrays (exactly these types). Objects that occur twice occur twice
    after unpickling too, as one object. The argument is not changed.
    """
    return _pack(obj, {})


def array_of(tensor: torch.Tensor) -> tuple[np.ndarray, str | None]:
    """A contiguous NumPy view of a dense tensor, or a copy where there is no such view.

    Returns:
        The array, and the name of the torch dtype when NumPy has no such dtype and the array holds its bits.
    """
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    bits = _VIEW_AS.get(host.dtype)
    if bits is None:
        return host.numpy(), None
    return host.view(bits).numpy(), str(host.dtype).removeprefix("torch.")


def tensor_of(array: np.ndarray, dtype_name: str | None = None) -> torch.Tensor:
    """The inverse of :func:`array_of`; shares memory with the array when that is writable, copies otherwise."""
    tensor = torch.from_numpy(writable(array))
    return tensor.view(getattr(torch, dtype_name)) if dtype_name else tensor


#: integer types by size, smallest first
_NARROW = (torch.uint8, torch.int16, torch.int32)


def compact(tensor: torch.Tensor) -> Any:
    """A carrier of a tensor in the smallest integer type that holds its values; other tensors as :func:`pack` does.

    Masks and token ids are int64 in a batch and need an eighth or a quarter of it on the way. Looking for the extremes
    and converting cost about as much as the bytes that they save would in shared memory, and far less than over a
    network. Unpickling gives the tensor back in its own type.
    """
    if tensor.dtype not in (torch.int64, torch.int32) or not _is_plain(tensor) or not tensor.numel():
        return pack(tensor)
    low, high = (int(value) for value in torch.aminmax(tensor))
    for dtype in _NARROW:
        limits = torch.iinfo(dtype)
        if dtype.itemsize < tensor.element_size() and limits.min <= low and high <= limits.max:
            name = str(tensor.dtype).removeprefix("torch.")
            return Carrier(_widened, (tensor.detach().to("cpu", dtype).contiguous().numpy(), name))
    return pack(tensor)


def nbytes(packed: Any) -> int:
    """Bytes of the array in a carrier of a tensor; of a tensor that could not be packed, its own."""
    array = packed.parts[0] if isinstance(packed, Carrier) else packed
    return int(array.nbytes)


def _widened(array: np.ndarray, dtype_name: str) -> torch.Tensor:
    return torch.from_numpy(array.astype(dtype_name))


def writable(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy when it is read-only."""
    return array if array.flags.writeable else array.copy()


def _tensordict_of(tensors: dict[str, Any], batch_size: tuple[int, ...]) -> TensorDict:
    return TensorDict(tensors, batch_size=batch_size)


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return dense and tensor.device.type != "meta" and tensor.dtype not in (torch.complex32,)


def _pack(obj: Any, memo: _Memo) -> Any:
    kind = type(obj)
    if kind in _ATOMS:
        return obj
    key = id(obj)
    if key in memo:
        return memo[key][1]
    memo[key] = (obj, obj)  # a container that holds itself must not recurse for ever
    packed = obj
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if _is_plain(obj):
            packed = Carrier(tensor_of, array_of(obj))
    elif kind is np.ndarray:
        packed = _pack_array(obj, memo)
    elif kind is dict:
        packed = _keep_or_replace(obj, {name: _pack(value, memo) for name, value in obj.items()}, obj.keys())
    elif kind is list:
        packed = _keep_or_replace(obj, [_pack(item, memo) for item in obj], range(len(obj)))
    elif kind is tuple:
        packed = _keep_or_replace(obj, tuple(_pack(item, memo) for item in obj), range(len(obj)))
    elif isinstance(obj, TensorDictBase):
        packed = _pack_tensordict(obj, memo)
    memo[key] = (obj, packed)  # also keeps `obj` alive: the id of a freed temporary could be given out again
    return packed


def _keep_or_replace(old: Any, new: Any, keys: Any) -> Any:
    return old if all(new[key] is old[key] for key in keys) else new


def _pack_array(array: np.ndarray, memo: _Memo) -> Any:
    if not array.dtype.hasobject:
        contiguous = array.flags.c_contiguous or array.flags.f_contiguous
        return Carrier(writable, (array if contiguous else array.copy(),))
    if array.dtype != object:
        return array
    flat = array.reshape(-1)
    items = [_pack(item, memo) for item in flat]
    if all(new is old for new, old in zip(items, flat, strict=True)):
        return array
    out = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        out[index] = item
    return out.reshape(array.shape)


def _pack_tensordict(tensordict: TensorDictBase, memo: _Memo) -> Any:
    values = dict(tensordict.items())
    if not all(isinstance(value, torch.Tensor | TensorDict) for value in values.values()):
        return tensordict  # non-tensor leaves know better how to pickle themselves
    packed = {name: _pack_field(value, memo) for name, value in values.items()}
    return Carrier(_tensordict_of, (packed, tuple(tensordict.batch_size)))


def _pack_field(value: torch.Tensor | TensorDict, memo: _Memo) -> Any:
    """A tensor of a batch, which is large as a rule: narrowed."""
    if type(value) is not torch.Tensor or id(value) in memo:
        return _pack(value, memo)
    memo[id(value)] = (value, compact(value))
    return memo[id(value)][1]
