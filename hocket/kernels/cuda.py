"""CUDA C++ compiled when it is needed, by NVRTC, which comes with PyTorch for CUDA: no compiler is installed.

Machine code is kept on disk under the hash of what it was made from, so that it is made once a machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent

Launch = Callable[[ctypes.Structure], None]  # queues a kernel with these arguments


class Unavailable(RuntimeError):
    """CUDA C++ cannot be compiled or loaded here; the message says why."""


def cache_folder() -> Path:
    """Where machine code is kept: $XDG_CACHE_HOME/hocket/kernels, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket" / "kernels"


def source(*names: str) -> str:
    """The texts of files of this folder, one after another."""
    return "\n".join(f'#line 1 "{name}"\n{(_FOLDER / name).read_text("utf-8")}' for name in names)


def compile_cubin(text: str, defines: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Machine code of `text` for one GPU generation; from disk if it has been made before.

    Raises `Unavailable`, with the compiler's messages where it has any.
    """
    options = [f"-D{name}={value}" for name, value in defines.items()]
    options += [
        "--std=c++17",
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}",
    ]
    nvrtc = _nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    made_of = "\0".join([text, *options, *(str(v.value) for v in version)])
    kept = cache_folder() / f"{hashlib.sha256(made_of.encode()).hexdigest()}.cubin"
    if kept.exists():
        return kept.read_bytes()

    program = ctypes.c_void_p()
    _nvrtc_ok(
        nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"hocket.cu", 0, None, None)
    )
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    if failed:
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise Unavailable(f"NVRTC gives {failed}: {log.decode(errors='replace')}")
    cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    try:  # a cache that cannot be written costs seconds at the next start, no more
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, kept)
    except OSError:
        pass
    return cubin


class Kernel:
    """One entry of some machine code, on one device."""

    def __init__(self, cubin: bytes, name: str, device: torch.device, shared_bytes: int) -> None:
        """shared_bytes: dynamic shared memory of a program. Raises `Unavailable`."""
        self._driver, self._device, self._shared = _driver(), device, shared_bytes
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
            self._check(
                self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
            )
            largest = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self._driver.cuFuncSetAttribute(self._function, largest, shared_bytes))

    def fitting(self, threads: int, cluster: int) -> int:
        """Clusters of so many programs that run at the same time. It differs between GPUs of one model: a
        cluster lies within a group of multiprocessors, and not all groups have equally many."""
        fit = ctypes.c_int()
        config = _Config(cluster, threads, self._shared, [_clustered(cluster)])
        with torch.cuda.device(self._device):
            code = self._driver.cuOccupancyMaxActiveClusters(
                ctypes.byref(fit), self._function, ctypes.byref(config)
            )
        self._check(code)
        return fit.value

    def check(self, grid: int, threads: int, cluster: int) -> None:
        """Raises `Unavailable` unless `grid` programs, in clusters of so many, can run at the same time."""
        fit = self.fitting(threads, cluster)
        if fit * cluster < grid:
            raise Unavailable(f"{fit} clusters of {cluster} programs fit at a time of {grid // cluster}")

    def launch(self, grid: int, threads: int, arguments: ctypes.Structure, cluster: int = 1) -> None:
        """Queue the kernel on the current stream, in clusters of so many programs; all `grid` run at the same
        time or it fails."""
        attributes = [_cooperative(), _clustered(cluster)][: 2 if cluster > 1 else 1]
        config = _Config(grid, threads, self._shared, attributes)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(self._device):
            config.stream = torch.cuda.current_stream().cuda_stream
            self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None))

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise Unavailable(f"the CUDA driver gives {code}: {(text.value or b'?').decode()}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


def _cooperative() -> _Attribute:
    return _Attribute(2, 0, (ctypes.c_uint * 16)(1))


def _clustered(programs: int) -> _Attribute:
    return _Attribute(4, 0, (ctypes.c_uint * 16)(programs, 1, 1))


class _Config(ctypes.Structure):
    """CUlaunchConfig, of programs in a row."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip

    def __init__(self, grid: int, threads: int, shared: int, attributes: Sequence[_Attribute]) -> None:
        one = ctypes.c_uint * 3
        self._kept = (_Attribute * len(attributes))(*attributes)
        super().__init__(
            one(grid, 1, 1), one(threads, 1, 1), shared, None, ctypes.addressof(self._kept), len(attributes)
        )


# --- libraries -----------------------------------------------------------------------------------


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as e:
        raise Unavailable(f"the CUDA driver's library cannot be loaded: {e}") from e


@cache
def _nvrtc() -> Any:
    """The NVRTC of PyTorch's own CUDA version, from its packages or where the loader looks."""
    if torch.version.cuda is None:
        raise Unavailable("PyTorch is built without CUDA")
    major, _, minor = torch.version.cuda.partition(".")
    folders = [Path(p) / sub for p in sys.path for sub in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib")]
    folders += [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "lib64", Path()]
    tried = []
    for folder in folders:
        library = folder / f"libnvrtc.so.{major}"
        if folder.name and not library.exists():
            continue
        try:
            if folder.name:  # found beside it only by a loader that looks there
                for builtins in sorted(folder.glob(f"libnvrtc-builtins.so.{major}.*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
        except OSError as e:
            tried.append(f"{library}: {e}")
    raise Unavailable(f"NVRTC {major}.{minor} cannot be loaded: {'; '.join(tried) or 'not found'}")


def _nvrtc_ok(nvrtc: Any, code: int) -> None:
    if code:
        raise Unavailable(f"NVRTC gives {code}")


def _read(size: Any, content: Any, program: ctypes.c_void_p) -> bytes:
    n = ctypes.c_size_t()
    size(program, ctypes.byref(n))
    buffer = ctypes.create_string_buffer(n.value)
    content(program, buffer)
    return buffer.raw
