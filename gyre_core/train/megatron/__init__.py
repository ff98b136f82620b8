"""The Megatron back end: the only folder that imports megatron (megatron-core 0.16.1, private names: pin exactly).

`backend.MegatronTrainer` is the entry point; importing this package alone imports neither torch nor megatron.
"""

import warnings

# Said at every import and load, about choices that are ours: no Transformer Engine, no Apex, Megatron's own format.
for _message, _kind in (
    (r".*Falling back to", UserWarning),
    (r"full scope is deprecated", UserWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
):
    warnings.filterwarnings("ignore", message=_message, category=_kind, module=r"(megatron|torch\.distributed)\.")
