# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""LT2: a looped language model whose mixers may be linear-time. Paper: LT2, arXiv 2605.20670."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils.type_validators import interval

from loopergy.configuration.adapter_targets import AdapterTargets
from loopergy.configuration.checked_fields import check_choices, check_fields, check_heads, preset_fields
from loopergy.configuration.layer_patterns import parse_layer_mixers, parse_loop_windows
from loopergy.configuration.linear_fields import LINEAR_MIXERS, fill_linear_fields, validate_linear
from loopergy.configuration.looped_config import FULL, INDEXED, POOLED, RECURRENT, SLIDING, LoopedConfigMixin
from loopergy.configuration.sparse_fields import fill_sparse_fields, validate_dsa, validate_nsa

_LT2_06B = {
    "vocab_size": 128256,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "gdn_num_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 1024**-0.5,
    "tie_word_embeddings": True,
}
_LT2_13B = {
    **_LT2_06B,
    "hidden_size": 2048,
    "initializer_range": 2048**-0.5,
    "intermediate_size": 5632,
    "gdn_num_heads": 16,
}

LT2_PRESETS: dict[str, dict[str, Any]] = {
    "lt2-0.6b-full": {**_LT2_06B, "num_hidden_layers": 25, "layer_mixers": "full"},
    "lt2-0.6b-gdn": {**_LT2_06B, "num_hidden_layers": 21, "layer_mixers": "gdn"},
    "lt2-0.6b-hybrid-full-gdn": {**_LT2_06B, "num_hidden_layers": 21, "layer_mixers": "gdn*4,full"},
    "lt2-1.3b-full": {**_LT2_13B, "num_hidden_layers": 25, "layer_mixers": "full"},
    "lt2-1.3b-gdn": {**_LT2_13B, "num_hidden_layers": 22, "layer_mixers": "gdn", "gdn_num_heads": 8},
    "lt2-1.3b-hybrid-full-gdn": {**_LT2_13B, "num_hidden_layers": 21, "layer_mixers": "gdn*4,full"},
    "lt2-1.3b-hybrid-gdn-dsa": {**_LT2_13B, "num_hidden_layers": 21, "layer_mixers": "gdn*4,dsa"},
    "ouro-hybrid-1.4b": {
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "layer_mixers": "gdn*3,full",
        "gdn_head_dim": 128,
        "gdn_expand_v": 1,
        "gdn_use_short_conv": False,
        "block_style": "sandwich",
        "norm_between_loops": True,
        "use_loop_residual": False,
        "early_exit_gate": True,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_loops": 2,
        "num_attention_heads": 4,
        "layer_mixers": "gdn*4,full",
        "max_position_embeddings": 512,
    },
}


@strict
class LT2Config(AdapterTargets, LoopedConfigMixin, PreTrainedConfig):
    """Describe an LT2 model: N physical layers, T loops, and the mixer of each layer.

    Default sizes are those of LT2's 0.6B hybrid; `from_preset("lt2-0.6b-hybrid-full-gdn")` also has its heads, tied
    embeddings and initialisation. Fields that belong to one mixer start with its name.

    Args:
        vocab_size, hidden_size, intermediate_size (`int`): vocabulary, width d, width of the gated MLP.
        num_hidden_layers (`int`): physical layers N, each visited once per loop.
        num_loops (`int`): loops T, at least 1.
        num_trained_loops (`int`, *optional*): loops the weights were made for: rows of the loop residual, entries of
            `loop_windows`. The `num_loops` of construction by default; it stays when `num_loops` is changed later.
            Loops beyond it reuse the last row.
        layer_mixers (`list[str]` or `str`): mixer per physical layer, `"full"`, `"window"`, `"gdn"`, `"kda"`,
            `"deltanet"`, `"mamba2"`, `"hgrn2"`, `"retnet"`, `"gla"`, `"la"`, `"nsa"` or `"dsa"`, or a pattern (see
            [`loopergy.configuration.layer_patterns`]); kept as the list.
        sliding_window (`int`): window in tokens of `"window"` layers, the token itself included.
        loop_windows (`list` or `str`, *optional*): window of all attention layers per loop, overriding the layer's
            own; `None` or `"full"` for none, or one list per loop with an entry per layer.
        num_attention_heads, num_key_value_heads, head_dim (`int`): of `"full"` and `"window"` layers; all heads have
            their own keys and values, `hidden_size / num_attention_heads` wide, by default.
        attention_bias, mlp_bias (`bool`): biases on q, k, v, o of every mixer and on the MLP (for converted
            models).
        attn_output_gate (`bool`): multiply the heads of attention layers by sigma(W x), W zero at the start.
        use_loop_residual (`bool`): add rho[t] * (input of loop t) after loop t; rho [T, d], zero at the start (eq. 2).
        block_style (`str`): `"pre"`, one norm before mixer and MLP each (LT2), or `"sandwich"`, one after them too
            (Ouro).
        norm_cast (`str`, *optional*): whether norms cast to the input's type `"after_weight"` (LT2; default for
            `"pre"`) or `"before_weight"` (Llama, Ouro; default for `"sandwich"`). They differ in half precision only.
        norm_between_loops (`bool`): apply the final norm after every loop and feed its output to the next (Ouro).
        early_exit_gate (`bool`): keep Ouro's exit gate; its exit distribution is an output. All loops always run.
        kv_sharing (`str`): `"none"`, or `"last"`: after the prompt all loops of an attention layer share the last
            loop's keys and values. Recurrent layers always keep one state per loop.
        gdn_num_heads (`int`, *optional*): heads of Gated DeltaNet; `num_attention_heads` by default.
        gdn_head_dim (`int`, *optional*): width of queries and keys; 0.75 * hidden_size / gdn_num_heads by default.
        gdn_expand_v (`float`): width of values over width of keys.
        gdn_use_short_conv (`bool`), gdn_conv_size (`int`): causal depthwise convolution on q, k, v.
        gdn_use_gate (`bool`): gate the normed output by SiLU(W_g x).
        gdn_allow_neg_eigval (`bool`): beta in (0, 2), so that transitions may reflect (needed for state tracking).
        gdn_norm_eps (`float`): epsilon of the head norm.
        kda_*, deltanet_*: fields of Kimi Delta Attention and DeltaNet with the meaning of those of `gdn`; heads are
            hidden_size / heads wide by default, and KDA's norm has the epsilon of the model's.
        mamba2_num_heads (`int`, *optional*), mamba2_expand (`float`), mamba2_state_size, mamba2_conv_size (`int`),
            mamba2_norm_eps (`float`, *optional*): heads of Mamba2, its inner width over hidden_size, numbers of state
            per inner channel, width of its convolution, and its norm's epsilon, the model's by default.
        hgrn2_*, retnet_*, gla_*, la_*: `num_heads` and `head_dim` (width of queries and keys, hidden_size / heads by
            default, half of that for `gla`), `expand_v` (width of values over width of keys) and `norm_eps` of HGRN2,
            RetNet, Gated Linear Attention and Linear Attention.
        gla_gate_rank (`int`), gla_gate_logit_normalizer (`float`): rank of the projection to the log decay, and what
            the log decay is divided by.
        nsa_num_key_value_heads (`int`): key-value heads of Native Sparse Attention; its query heads are
            `num_attention_heads`, `head_dim` wide.
        nsa_block_size, nsa_block_count (`int`): tokens of a block; blocks that a query reads, at least 3.
        nsa_window (`int`): tokens of the window branch, the token itself included.
        nsa_pool_size, nsa_pool_stride (`int`, *optional*): tokens that an average is over, and from one to the next;
            those of a block by default, without overlap.
        dsa_latent_dim, dsa_tail_dim (`int`): the latent that all heads of DeepSeek Sparse Attention share is both
            together wide as a key, and `dsa_latent_dim` as a value.
        dsa_rope (`bool`): rotary positions on the tail; without it the mixer has no positions (as released).
        dsa_topk (`int`): tokens that a query reads.
        dsa_keep_current (`bool`): the query's own token is always one of them; otherwise only if it ranks (as
            released).
        dsa_indexer (`str`): `"lt2"`, mean of the index heads' products (as released), or `"deepseek"`, the lightning
            indexer.
        dsa_index_heads (`int`, *optional*), dsa_index_head_dim (`int`): of the indexer; as many heads as attention has
            by default.
        dsa_indexer_loss_weight (`float`): weight of the indexer's divergence from the attention in the loss; 0 leaves
            the indexer untrained (as released).
        dsa_dense_warmup (`bool`): attend to all tokens while the indexer learns on all; turn it off afterwards.
        hidden_act, max_position_embeddings, rms_norm_eps, initializer_range, rope_parameters, attention_dropout,
            tie_word_embeddings and the token ids: as in Llama.

    Source: arXiv 2605.20670, section 3 and the released recipes; sizes of the presets from its appendix C. For the
    0.6B hybrid the paper's 21 layers and 8 GDN heads of 96 / 192 are combined with the 16 attention heads of its full
    model.
    """

    model_type = "lt2"
    # The counterparts of queries and values: i_proj of `hgrn2`, kv_proj of `dsa`, in_proj of `mamba2`.
    adapter_targets = ["q_proj", "v_proj", "i_proj", "kv_proj", "in_proj"]
    rescaling_targets = ["k_proj", "v_proj", "i_proj", "kv_proj", "in_proj", "down_proj"]
    keys_to_ignore_at_inference = ["cache", "loop_hidden_states", "loop_logits", "exit_pdf", "indexer_divergence"]
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 128256
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = interval(min=1)(default=21)
    num_loops: int = interval(min=1)(default=4)
    num_trained_loops: int | None = None
    layer_mixers: list[str] | str = "gdn*4,full"
    sliding_window: int = interval(min=1)(default=2048)
    loop_windows: list | str | None = None
    num_attention_heads: int = interval(min=1)(default=16)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: int | float = 0.0
    attn_output_gate: bool = False
    use_loop_residual: bool = True
    block_style: str = "pre"
    norm_cast: str | None = None
    norm_between_loops: bool = False
    early_exit_gate: bool = False
    kv_sharing: str = "none"
    gdn_num_heads: int | None = None
    gdn_head_dim: int | None = None
    gdn_expand_v: int | float = 2
    gdn_use_short_conv: bool = True
    gdn_conv_size: int = interval(min=2)(default=4)
    gdn_use_gate: bool = True
    gdn_allow_neg_eigval: bool = False
    gdn_norm_eps: float = 1e-5
    kda_num_heads: int | None = None
    kda_head_dim: int | None = None
    kda_expand_v: int | float = 1
    kda_use_short_conv: bool = True
    kda_conv_size: int = interval(min=2)(default=4)
    kda_allow_neg_eigval: bool = False
    kda_norm_eps: float | None = None
    deltanet_num_heads: int | None = None
    deltanet_head_dim: int | None = None
    deltanet_expand_v: int | float = 1
    deltanet_use_short_conv: bool = True
    deltanet_conv_size: int = interval(min=2)(default=4)
    deltanet_allow_neg_eigval: bool = False
    deltanet_norm_eps: float = 1e-5
    mamba2_num_heads: int | None = None
    mamba2_expand: int | float = 2
    mamba2_state_size: int = interval(min=1)(default=64)
    mamba2_conv_size: int = interval(min=2)(default=4)
    mamba2_norm_eps: float | None = None
    hgrn2_num_heads: int | None = None
    hgrn2_head_dim: int | None = None
    hgrn2_expand_v: int | float = 1
    hgrn2_norm_eps: float = 1e-5
    retnet_num_heads: int | None = None
    retnet_head_dim: int | None = None
    retnet_expand_v: int | float = 2
    retnet_norm_eps: float = 1e-5
    gla_num_heads: int | None = None
    gla_head_dim: int | None = None
    gla_expand_v: int | float = 2
    gla_gate_rank: int = interval(min=1)(default=16)
    gla_gate_logit_normalizer: int | float = 16
    gla_norm_eps: float = 1e-5
    la_num_heads: int | None = None
    la_head_dim: int | None = None
    la_expand_v: int | float = 1
    la_norm_eps: float = 1e-5
    nsa_num_key_value_heads: int = 1
    nsa_block_size: int = interval(min=1)(default=64)
    nsa_block_count: int = interval(min=3)(default=16)
    nsa_window: int = interval(min=1)(default=512)
    nsa_pool_size: int | None = None
    nsa_pool_stride: int | None = None
    dsa_latent_dim: int = interval(min=1)(default=512)
    dsa_tail_dim: int = interval(min=0)(default=64)
    dsa_rope: bool = False
    dsa_topk: int = interval(min=1)(default=2048)
    dsa_keep_current: bool = False
    dsa_indexer: str = "lt2"
    dsa_index_heads: int | None = None
    dsa_index_head_dim: int = interval(min=1)(default=64)
    dsa_indexer_loss_weight: int | float = 0.0
    dsa_dense_warmup: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    rope_parameters: dict | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.gdn_num_heads is None:
            self.gdn_num_heads = self.num_attention_heads
        self.layer_mixers = parse_layer_mixers(self.layer_mixers, self.num_hidden_layers)
        fill_linear_fields(self)
        fill_sparse_fields(self)
        if self.gdn_head_dim is None:
            self.gdn_head_dim = self._default_gdn_head_dim(self.gdn_num_heads)
        if self.norm_cast is None:
            self.norm_cast = "before_weight" if self.block_style == "sandwich" else "after_weight"
        if self.num_trained_loops is None:
            self.num_trained_loops = self.num_loops
        self.loop_windows = self._parse_windows(self.loop_windows)
        super().__post_init__(**kwargs)

    def __setattr__(self, key: str, value: Any) -> None:
        if self.__dict__.get("_post_init_done"):
            # Patterns are also parsed on assignment: `from_pretrained(name, layer_mixers="gdn,full")` sets the field.
            if key == "layer_mixers":
                value = parse_layer_mixers(value, self.num_hidden_layers)
            elif key == "loop_windows":
                value = self._parse_windows(value)
        super().__setattr__(key, value)

    def _parse_windows(self, windows: list | str | None) -> list | None:
        trained = self.num_trained_loops or self.num_loops
        field = "num_loops" if trained == self.num_loops else "num_trained_loops"
        return parse_loop_windows(windows, trained, self.num_hidden_layers, field)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "LT2Config":
        """Build the config of a published size; `LT2_PRESETS` lists them. `overrides` replace single fields.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return cls(**preset_fields(cls, LT2_PRESETS, name, overrides))

    def _default_gdn_head_dim(self, heads: int) -> int:
        head_dim, rest = divmod(3 * self.hidden_size, 4 * heads)
        if rest and "gdn" in self.layer_mixers:
            raise ValueError(
                f"gdn_head_dim is not given and 0.75 * hidden_size / gdn_num_heads = 0.75 * {self.hidden_size} / "
                f"{heads} is no whole number: pass gdn_head_dim."
            )
        return head_dim

    @property
    def gdn_value_head_dim(self) -> int:
        """Width of one value head of Gated DeltaNet."""
        return int((self.gdn_head_dim or 0) * self.gdn_expand_v)

    def window(self, loop: int, layer: int) -> int | None:
        """Return the attention window in tokens of one visit, `None` without one."""
        if self.loop_windows is not None:
            entry = self.loop_windows[min(loop, len(self.loop_windows) - 1)]
            return entry[layer] if isinstance(entry, list) else entry  # pyright: ignore[reportReturnType]
        return self.sliding_window if self.layer_mixers[layer] == "window" else None

    def visit(self, loop: int, layer: int) -> tuple[str, int | None]:
        """Return (cache layer type, window) of one visit."""
        if self.layer_mixers[layer] in LINEAR_MIXERS:
            return RECURRENT, None
        if self.layer_mixers[layer] in ("nsa", "dsa"):
            return (POOLED if self.layer_mixers[layer] == "nsa" else INDEXED), None
        window = self.window(loop, layer)
        return (FULL, None) if window is None else (SLIDING, window)

    def validate_architecture(self) -> None:
        """Check fields, and against each other; each error names the field, its value and what is allowed."""
        check_fields(self)
        choices = {
            "block_style": ("pre", "sandwich"),
            "norm_cast": ("before_weight", "after_weight"),
            "kv_sharing": ("none", "last"),
        }
        check_choices(self, choices)
        mixers = set(self.layer_mixers)
        if mixers & {"full", "window"}:
            self._validate_attention()
        if "nsa" in mixers:
            validate_nsa(self)
        if "dsa" in mixers:
            validate_dsa(self)
        for mixer in sorted(mixers.intersection(LINEAR_MIXERS)):
            validate_linear(self, mixer)

    def _validate_attention(self) -> None:
        check_heads(self)
        windowed = self.loop_windows is not None or "window" in self.layer_mixers
        if self.kv_sharing == "last" and windowed:
            raise ValueError(
                "kv_sharing='last' needs attention layers without windows: a window that has moved on cannot be "
                "rewritten by the next loop. Drop the windows or use kv_sharing='none'."
            )


__all__ = ["LT2_PRESETS", "LT2Config"]
