"""The platform class: what SGLang asks about the device, answered for host memory and plain torch."""

import gc

import psutil
import torch
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform


class GyreCpuPlatform(SRTPlatform):
    """One CPU "device" whose memory is the machine's."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no Triton, no graphs, no device kernels

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        pass

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def empty_cache(self) -> None:
        gc.collect()

    def synchronize(self) -> None:
        pass

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
