"""The tensors of a GGUF file, under the names and in the order that they have in a Hugging Face folder."""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tiercel.modelfile.fields import MetadataFields
from tiercel.modelfile.header import FileTensor, read_header
from tiercel.modelfile.model_config import read_family
from tiercel.modelfile.tensor_names import names_in_folder

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorSlice:
    """The shape of a tensor, without its content; as safetensors' slices have it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._shape)


class MappedModelFile:
    """The tensors of an open GGUF file, with the methods of an open safetensors file.

    A tensor of floating-point numbers has its shape. Another one has the bytes of its blocks: [rows, bytes of a row]
    uint8. Weights of queries and keys of the architecture `llama` are copied, because their rows are in another order;
    other tensors are views of the file.
    """

    def __init__(self, content: mmap.mmap, tensors: Mapping[str, FileTensor], heads: Mapping[str, int]) -> None:
        """`tensors`: by their names in a folder; `heads`: of layers with rows in another order, by their last name."""
        self._content = content
        self._tensors = tensors
        self._heads = heads

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> TensorSlice:
        """Return the shape of a tensor."""
        return TensorSlice(_stored_shape(self._tensors[name]))

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor = self._tensors[name]
        raw = torch.frombuffer(self._content, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        dtype = _DTYPES.get(tensor.type.name, torch.uint8)
        stored = raw.view(dtype).view(_stored_shape(tensor))
        heads = self._heads.get(name.split(".")[-2])
        return stored if heads is None else _rows_of_halves(stored, heads)


@contextmanager
def open_model_file(path: Path) -> Iterator[MappedModelFile]:
    """Open a GGUF file whose tensors are used until the end of the block.

    Errors: ModelFileError naming the file, and the key or tensor; OSError.
    """
    header = read_header(path)
    fields = MetadataFields(header)
    names = names_in_folder(header)
    tensors = {names[name]: tensor for name, tensor in header.tensors.items() if name in names}
    heads: dict[str, int] = {}
    if read_family(header).permutes_rows:
        place = f"{fields.text('general.architecture')}.attention"
        queries = fields.count(f"{place}.head_count")
        heads = {"q_proj": queries, "k_proj": fields.count(f"{place}.head_count_kv", queries)}
    # A private mapping, because torch wants memory that it may write to. It ends with the last tensor that views it.
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    yield MappedModelFile(content, tensors, heads)


def _stored_shape(tensor: FileTensor) -> tuple[int, ...]:
    if tensor.type.is_float:
        return tensor.shape
    return (*tensor.shape[:-1], tensor.shape[-1] // tensor.type.numbers * tensor.type.nbytes)


def _rows_of_halves(stored: Tensor, heads: int) -> Tensor:
    """Return the rows of each head as transformers rotates them: first the first of each pair, then the second.

    The file has the rows of a pair beside each other, as the paper of RoPE does: https://arxiv.org/abs/2104.09864,
    section 3.2. Shapes: [heads * head_dim, ...] in and out; other ones are returned as they are, to be refused later.
    """
    rows = stored.shape[0]
    if rows % (2 * heads):
        return stored
    pairs = stored.view(heads, rows // heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
