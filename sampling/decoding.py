"""The decode step: one more token for every row of a batch, in memory set aside before, asking the host nothing.

One function runs on a CPU, on the meta device in a test, and on CUDA, where it is captured as a graph.

Shapes: R rows of N prompts, P prompt tokens, H hidden size, V vocabulary. A token has a slot, the same column in keys,
values and all else that is kept of a row, where its prompt, left-padded, comes first; room is the number of slots.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_or_products"


def attention(module, query, key, value, attention_mask, scaling=None, **options):
    """SDPA, but for one query token on a CPU, where two matrix products take a third of its time."""
    if query.device.type != "cpu" or query.shape[2] > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    R, heads, _, D = query.shape
    grouped = query.reshape(R, key.shape[1], -1, D) * (
        D**-0.5 if scaling is None else scaling
    )  # by what they share
    scores = grouped @ key.mT  # (R, kv heads, heads / kv heads, room)
    probs = (scores if attention_mask is None else scores + attention_mask).softmax(
        -1, dtype=torch.float32
    )
    return (probs.to(value.dtype) @ value).reshape(R, 1, heads, -1), None


def mask(q_length, attention_mask, local_size=None, dtype=torch.float32, **options):
    """(R, 1, 1, room) to be added to the scores of one query token: transformers' own code for it asks the host.

    Called by the model's code for each kind of its layers. attention_mask: (R, room), what lies ahead left out.
    local_size: of a sliding window.
    """
    if q_length > 1 or attention_mask is None:
        return sdpa_mask(
            q_length=q_length, attention_mask=attention_mask, local_size=local_size, **options
        )
    if local_size:
        slots = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        attention_mask = attention_mask & (
            slots > (slots * attention_mask).amax(1, keepdim=True) - local_size
        )
    return torch.zeros_like(attention_mask, dtype=dtype).masked_fill_(~attention_mask, -torch.inf)[
        :, None, None
    ]


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)


class Slots(DynamicLayer):
    """One layer's keys and values, (R, heads, room, head_dim) each, which a step writes at one slot for all rows."""

    def __init__(self, slot: Tensor, reserve: int):
        super().__init__()
        self.slot, self.reserve, self.memory = slot, reserve, [torch.empty(0), torch.empty(0)]

    def fit(self, keys: Tensor, values: Tensor, room: int, each: int = 1) -> None:
        """Hold each row of these, (R / each, heads, used, head_dim), `each` times, and room for more.

        All is contiguous, since products copy views. Memory is made where it does not suffice, for `reserve` places
        (rows x room) at least; else it stays where it is.
        """
        held = []
        for i, x in enumerate((keys, values)):
            N, heads, used, D = x.shape
            if self.memory[i].numel() < N * each * heads * room * D:
                self.memory[i] = x.new_empty(max(N * each * room, self.reserve) * heads * D)
            elif x.data_ptr() == self.memory[i].data_ptr():
                x = x.clone()
            copies = self.memory[i][: N * each * heads * room * D].view(N, each, heads, room, D)
            copies[:, :, :, :used] = x.unsqueeze(1)
            copies[:, :, :, used:] = 0  # it is masked, but 0 times what nobody wrote could be NaN
            held.append(copies.flatten(0, 1))
        self.keys, self.values = held

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length):
        return self.keys.shape[2], 0


class Decoder:
    """The rows that are sampled together, and the step that moves all of them on by one token."""

    reserve = 0  # places (rows x room) of keys and values to be set aside at once

    def __init__(self, model: PreTrainedModel, rows: int, room: int):
        """For at most so many rows and slots."""
        device, self.rows = model.device, rows
        self.look, block = (
            (1, 32) if device.type == "cpu" else (8, 128)
        )  # steps between looks for ends
        self.rooms = range(block, room + block, block)  # the sizes that the room grows through
        self.slot = torch.zeros(
            1, dtype=torch.long, device=device
        )  # of each row's last token, which has not run yet
        self.padding = torch.zeros(rows, 1, dtype=torch.long, device=device)  # of each row's prompt
        self.tokens = torch.zeros(rows, room, dtype=torch.long, device=device)
        self.logps = torch.zeros(rows, room, device=device)
        self.uniforms = torch.zeros(rows, room, dtype=torch.float64, device=device)  # in (0, 1]
        self.cache = DynamicCache()

    def start(self, cache: DynamicCache, mask: Tensor, uniforms: Tensor) -> None:
        """Begin with prompts that have run, by their keys and values and their mask (N, P): R / N rows of each.

        uniforms: (R, n) for the draws of n tokens.
        """
        R, each, P = len(uniforms), len(uniforms) // len(mask), mask.shape[1]
        self.cache.layers = self.cache.layers or [
            Slots(self.slot, self.reserve) for _ in cache.layers
        ]
        self.fit(cache, P, each)
        self.padding[:R] = (P - mask.sum(1, keepdim=True)).repeat_interleave(each, dim=0)
        self.uniforms[:R, P : P + uniforms.shape[1]] = uniforms
        self.slot.fill_(P)

    def fit(
        self, cache: DynamicCache, used: int, each: int = 1, rows: Tensor | slice = slice(None)
    ) -> None:
        """Hold the given rows of a cache, `each` times, with room for more than the slots that are used."""
        room = next(size for size in self.rooms if size > used)
        for slots, layer in zip(self.cache.layers, cache.layers, strict=True):
            slots.fit(layer.keys[rows, :, :used], layer.values[rows, :, :used], room, each)

    def keep(self, rows: Tensor, used: int) -> None:
        """Go on with the given rows alone, in that order."""
        self.fit(self.cache, used, rows=rows)
        for state in (self.padding, self.tokens, self.logps, self.uniforms):
            state[: len(rows)] = state[rows]

    @property
    def size(self) -> tuple[int, int]:
        """(rows, room) that a step goes over."""
        rows, _, room, _ = self.cache.layers[0].keys.shape
        return rows, room

    def step(self, model: PreTrainedModel, temperature: float) -> None:
        """Run the last token of each row, and draw the next one."""
        rows, room = self.size
        slots = torch.arange(room, device=self.slot.device)
        seen = (slots >= self.padding[:rows]) & (slots <= self.slot)  # (rows, room)
        hidden = model.get_decoder()(
            self.tokens[:rows].index_select(1, self.slot),
            attention_mask=seen
            if model.config._attn_implementation == ATTENTION
            else mask(1, seen, dtype=model.dtype),
            position_ids=self.slot - self.padding[:rows],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        self.slot += 1
        self.draw(model, hidden, temperature)

    def draw(self, model: PreTrainedModel, hidden: Tensor, temperature: float) -> None:
        """A token for each row from its last hidden state (R, H), by inverting its distribution function."""
        R = len(hidden)
        probs = (model.get_output_embeddings()(hidden).float() / (temperature or 1.0)).softmax(
            -1
        )  # (R, V)
        if temperature:
            cumulative = probs.cumsum(
                -1, dtype=torch.float64
            )  # in float32 a GPU's sum is not quite monotonic
            u = self.uniforms[:R].index_select(1, self.slot)  # (R, 1)
            token = torch.searchsorted(cumulative, u * cumulative[:, -1:]).clamp(
                max=probs.shape[1] - 1
            )  # of NaN
        else:
            token = probs.argmax(-1, keepdim=True)
        self.tokens[:R].index_copy_(1, self.slot, token)
        self.logps[:R].index_copy_(1, self.slot, probs.gather(1, token).log())


# --- CUDA graphs: one launch for a step instead of thousands --------------------------------------
# None of these lines has run on a GPU yet: selfcheck.py compares captured steps with others there.


class Captured(Decoder):
    """A decoder whose step is captured for each number of rows, room and temperature, when it first comes up."""

    MOST = 100  # graphs; a step beyond them is an ordinary one

    def __init__(self, model, rows, room):
        super().__init__(model, rows, room)
        self.graphs, self.works, self.side = {}, True, None
        self.reserve = rows * self.rooms[-1]  # what a graph reads and writes must stay where it is

    def step(self, model, temperature):
        key = (*self.size, temperature)
        if self.works and key not in self.graphs and len(self.graphs) < self.MOST:
            before = self.slot.clone()
            try:
                self.graphs[key] = self._capture(model, temperature, before)
            except (
                RuntimeError
            ) as error:  # the model's own code asks the host, or the driver cannot
                print(
                    f"sampling without CUDA graphs, which is slower: {' '.join(str(error).split())[:200]}"
                )
                self.works = False
            self.slot.copy_(before)
        if self.works and key in self.graphs:
            self.graphs[key].replay()
        else:
            super().step(model, temperature)

    def _capture(self, model, temperature, before):
        """A graph of the step. What its trials write, the step itself writes again, the same."""
        self.side = self.side or torch.cuda.Stream()
        graph, here, checks = (
            torch.cuda.CUDAGraph(),
            torch.cuda.current_stream(),
            torch.cuda.get_sync_debug_mode(),
        )
        self.side.wait_stream(here)
        try:
            with torch.cuda.stream(self.side):
                super().step(model, temperature)  # kernels are chosen, workspaces made
                self.slot.copy_(before)
                torch.cuda.set_sync_debug_mode(
                    "error"
                )  # what asks the host raises here: a capture would be left open
                super().step(model, temperature)
        finally:
            torch.cuda.set_sync_debug_mode(checks)
            here.wait_stream(self.side)
        self.slot.copy_(before)
        pool = next(
            (made.pool() for made in self.graphs.values()), None
        )  # one for all: they run one at a time
        with (
            torch.cuda.stream(here),
            torch.cuda.graph(graph, pool, self.side, capture_error_mode="thread_local"),
        ):
            super().step(model, temperature)
        return graph


KEPT: WeakKeyDictionary[PreTrainedModel, Captured] = (
    WeakKeyDictionary()
)  # a graph knows where its memory lies


def decoder_for(model: PreTrainedModel, cache: DynamicCache, rows: int, room: int) -> Decoder:
    """A decoder for so many rows and slots; on CUDA the model's own, with its graphs, unless that fills the memory.

    Only a bfloat16 copy is captured: autocast keeps casts of float32 weights, which would go stale in a graph.
    """
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return Decoder(model, rows, room)
    kept = KEPT.get(model)
    if kept and kept.rows >= rows and kept.rooms[-1] >= room:
        return kept
    states = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    place = sum(x.shape[1] * x.shape[3] * x.element_size() for x in states)  # bytes of a row's slot
    grown = [(max(rows, kept.rows), max(room, kept.rooms[-1]))] if kept else []
    for size in (*grown, (rows, room)):
        decoder = Captured(model, *size)
        if (
            decoder.reserve * place
            <= torch.cuda.get_device_properties(model.device).total_memory / 8
        ):
            KEPT[model] = (
                decoder  # its memory stays while the loss runs, and so must not be too much
            )
            return decoder
    return Decoder(model, rows, room)
