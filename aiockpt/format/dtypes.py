"""The dtypes of torch by the names that files of torch know them by."""

from __future__ import annotations

import torch

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""By name in the module ``torch``, aliases included."""

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
"""By the storage class that pickles name, without the quantized ones."""

QUANTIZED_STORAGE_DTYPES = {
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
"""Quantized dtypes by the storage class that pickles name."""

QUANTIZED_DTYPES = frozenset(QUANTIZED_STORAGE_DTYPES.values())
