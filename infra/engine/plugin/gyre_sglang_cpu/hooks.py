"""Replacements for SGLang 0.5.23 internals that assume CUDA, or that a small CPU server cannot afford.

Correctness on host memory: one-sided weight writes (remote-instance weights over Mooncake), the hierarchical KV cache
and prefill/decode disaggregation, whose "device" pool is ordinary memory here; a seed of its own for each call
(sampling.py). Cost: batched attention (attention.py), forked worker processes, no polling while paused.
"""

import functools
import inspect
import multiprocessing
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    """Apply every hook to this process."""
    _unpin_host_pools()
    _lower_host_reserve()
    _replace_kv_copies()
    _use_host_indices_in_mooncake_sender()
    _register_weights_tensor_by_tensor()
    _batch_attention()
    _seed_each_call()
    _fork_workers()
    _sleep_while_paused()


def _unpin_host_pools() -> None:
    """Host KV pools need no pinned memory: nothing here has a DMA engine, and a CPU torch cannot pin."""
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    original = HostKVCache.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_unpinned(*args: object, **kwargs: object) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    HostKVCache.__init__ = init_unpinned


def _lower_host_reserve() -> None:
    """Host KV pools leave 1 GiB of the machine free; SGLang's 10 GiB are a GPU server's."""
    import sglang.srt.mem_cache.pool_host.base as base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 2**30


def _replace_kv_copies() -> None:
    """The copies between the device pool and the host pool (kv_copies.py)."""
    import sglang.srt.mem_cache.pool_host.mha as mha

    from gyre_sglang_cpu import kv_copies

    mha.transfer_kv_direct = kv_copies.copy_layer_first
    mha.transfer_kv_per_layer_direct_pf_lf = kv_copies.load_layer_from_pages
    mha.transfer_kv_all_layer_direct_lf_pf = kv_copies.store_layers_to_pages


def _use_host_indices_in_mooncake_sender() -> None:
    """Disaggregation: the synchronous index path; the asynchronous one needs pinned memory and CUDA events."""
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:  # Mooncake is optional
        return
    MooncakeKVSender.supports_host_tensor_indices = False


def _register_weights_tensor_by_tensor() -> None:
    """Remote-instance weights: register each parameter. The other way walks the CUDA allocator's blocks."""
    import sglang.srt.model_loader.remote_instance_weight_loader_utils as loader_utils

    loader_utils.register_memory_region_v2 = loader_utils.register_memory_region_v1


def _batch_attention() -> None:
    """`--attention-backend torch_native` becomes the batched one."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def create(runner: Any) -> Any:
        from gyre_sglang_cpu.attention import BatchedTorchNativeBackend

        return BatchedTorchNativeBackend(runner)

    ATTENTION_BACKENDS["torch_native"] = create


def _seed_each_call() -> None:
    """Honour `sampling_seed` without `--enable-deterministic-inference` (sampling.py)."""
    import sglang.srt.layers.sampler as sampler

    from gyre_sglang_cpu import sampling

    sampler.murmur_hash32 = sampling.murmur_hash32
    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(target, sampling.with_seeds, HookType.AROUND)


def _fork_workers() -> None:
    """Fork the scheduler and the detokenizer instead of spawning them.

    Each spawned process imports SGLang again: 31 CPU seconds and 1.6 GB a server instead of 16 s and 1.1 GB. Forking is
    safe here: the launcher has started neither threads that hold locks nor Mooncake or torch work by then.
    """

    def set_fork(result: object, *args: object, **kwargs: object) -> None:
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", set_fork, HookType.AFTER)


def _sleep_while_paused() -> None:
    """A paused scheduler waits for messages instead of polling them on a whole core (with `--sleep-on-idle`)."""

    def wait(result: object, scheduler: Any, *args: object, **kwargs: object) -> None:
        scheduler.maybe_sleep_on_idle()

    target = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(target, wait, HookType.AFTER)
