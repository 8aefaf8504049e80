"""The border to CUDA: errors get names, memory is accounted, and a process that used a GPU ends cleanly."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.runners.gpu.device.arena import Arena
from nightmill.worker.runners.gpu.device.compiler import compile_kernels
from nightmill.worker.runners.gpu.device.device import (
    CudaError,
    Device,
    DeviceLostError,
    DeviceMemoryError,
    KernelLaunchError,
    NoDeviceError,
)
from nightmill.worker.runners.gpu.device.functions import Module

KERNELS = """
extern "C" __global__ void twice(const float* in, float* out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = 2 * in[i];
}
extern "C" __global__ void stray() { *(volatile int*)16 = 1; }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "simple.cu"
    path.write_text(KERNELS)
    return path


def test_a_kernel_computes(device: Device, source: Path) -> None:
    twice = Module(device, compile_kernels(source, (), device.architecture), "simple.cu").function(
        "twice", "PPi"
    )
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    out = device.upload(np.full(1000, np.nan, dtype=np.float32))
    twice((4, 1), (256, 1, 1), device.upload(values), out, 1000)
    np.testing.assert_array_equal(device.download(out, 1000, np.float32), 2 * values)


def test_a_refused_launch_names_kernel_and_shape(device: Device, source: Path) -> None:
    twice = Module(device, compile_kernels(source, (), device.architecture), "simple.cu").function(
        "twice", "PPi"
    )
    with pytest.raises(KernelLaunchError, match=r"twice with grid \(1, 1\), block \(2048, 1, 1\)"):
        twice((1, 1), (2048, 1, 1), 0, 0, 1)


def test_an_unknown_kernel_is_a_named_error(device: Device, source: Path) -> None:
    module = Module(device, compile_kernels(source, (), device.architecture), "simple.cu")
    with pytest.raises(CudaError, match="thrice"):
        module.function("thrice")


def test_an_allocation_that_cannot_fit_says_what_is_free(device: Device) -> None:
    with pytest.raises(DeviceMemoryError, match="bytes left for the weights"):
        device.allocate(device.total_memory * 2, "the weights")


def test_an_arena_gives_out_aligned_pieces_and_no_more_than_it_has(device: Device) -> None:
    arena = Arena(device, 1024, "tests")
    first, second = arena.take(1), arena.take(300)
    assert (first % 256, second - first) == (0, 256)
    with pytest.raises(DeviceMemoryError, match="planned too small"):
        arena.take(512)


def test_memory_is_free_again_after_close() -> None:
    with Device(0) as device:
        free = device.free_memory()
        device.allocate(1 << 28)
        assert device.free_memory() <= free - (1 << 28)
    with Device(0) as device:
        assert device.free_memory() > free - (1 << 26)


def test_a_gpu_that_does_not_exist_is_a_named_error() -> None:
    with pytest.raises(NoDeviceError, match="there is no GPU 99"):
        Device(99)


@pytest.mark.parametrize(
    "ending", ["device.close()", "pass", "raise SystemExit(0)", "device.close(); device.close()"]
)
def test_a_process_that_used_a_gpu_ends_cleanly(ending: str) -> None:
    code = (
        "from nightmill.worker.runners.gpu.device.device import Device\n"
        f"device = Device(0)\ndevice.allocate(1000)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_thread_may_die_with_its_context() -> None:
    code = (
        "import threading, time\nfrom nightmill.worker.runners.gpu.device.device import Device\n"
        "def own():\n    global device\n    device = Device(0)\n    time.sleep(60)\n"
        "threading.Thread(target=own, daemon=True).start()\ntime.sleep(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_illegal_address_means_that_the_device_is_lost(source: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from nightmill.worker.runners.gpu.device.compiler import compile_kernels\n"
        "from nightmill.worker.runners.gpu.device.device import Device, DeviceLostError\n"
        "from nightmill.worker.runners.gpu.device.functions import Module\n"
        "device = Device(0)\n"
        f"module = Module(device, compile_kernels(Path({str(source)!r}), (), device.architecture), 'stray')\n"
        "module.function('stray')((1, 1), (1, 1, 1))\n"
        "try:\n    device.synchronize()\n"
        "except DeviceLostError as error:\n    print('lost:', error)\n"
        "assert device.lost\ndevice.close()\nsys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "illegal memory access" in done.stdout
    assert issubclass(DeviceLostError, CudaError)
