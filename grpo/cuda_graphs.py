"""Decode steps as CUDA graphs: one launch for a step instead of thousands.

`sampling_logp_gap` in the logs shows whether captured steps sample from the policy.

Shapes: R sequences, S columns of the KV cache.
"""

from functools import partial
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from grpo.decoding import Decoder, run_prompts


class CapturedDecoder(Decoder):
    """A decoder whose steps are captured as CUDA graphs and replayed.

    There is one graph for each number of sequences, number of columns and temperature. A graph
    reads and writes fixed addresses, so what a step uses is stored in memory that never moves.
    """

    columns_per_block = 128
    MAX_GRAPHS = 200  # then the least recently used one is dropped

    def __init__(self, device: torch.device, max_rows: int, max_columns: int):
        super().__init__(device, max_rows)
        self.max_columns = max_columns
        self.memory = {}
        self.graphs = {}  # {size and temperature: (graph, its results)}, the last used one last
        self.uses_graphs = True  # until a capture fails
        self.capture_stream = None

    def _store(self, name, states):
        if name not in self.memory:
            elements_of_cell = states[0, :, 0].numel() if states.dim() == 4 else 1
            num_elements = self.max_rows * self.max_columns * elements_of_cell
            self.memory[name] = states.new_empty(num_elements)
        return self.memory[name][: states.numel()].view(states.shape).copy_(states)

    def _run(self, model, token, uniforms, temperature):
        inputs = (self._store("token", token), self._store("uniforms", uniforms), temperature)
        if not self.uses_graphs:
            return super()._run(model, *inputs)
        key = (*self.size, temperature)
        captured = self.graphs.pop(key, None)
        if captured is None:
            try:
                captured = self._capture(model, *inputs)
            except RuntimeError as error:
                # The model's code copies a value to Python, or the driver refuses.
                reason = " ".join(str(error).split())[:200]
                print(f"sampling without CUDA graphs, which is slower: {reason}")
                self.uses_graphs = False
                return super()._run(model, *inputs)
        if len(self.graphs) == self.MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = captured
        graph, results = captured
        graph.replay()
        return [result.clone() for result in results]  # the next replay writes to the same memory

    def _capture(self, model, *inputs):
        """A graph of the step and its results, after two trial steps that write to its places."""
        if self.capture_stream is None:
            self.capture_stream = torch.cuda.Stream()
        step = partial(super()._run, model, *inputs)
        main_stream = torch.cuda.current_stream()
        self.capture_stream.wait_stream(main_stream)
        try:
            with torch.cuda.stream(self.capture_stream):
                step()  # chooses kernels and makes workspaces
                # If the step copies a value to Python, it raises here, which is harmless; an error
                # during the capture would leave the capture unfinished.
                torch.cuda.set_sync_debug_mode("error")
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            main_stream.wait_stream(self.capture_stream)
        graph = torch.cuda.CUDAGraph()
        # All graphs share one memory pool, since they run one at a time.
        pool = next((earlier_graph.pool() for earlier_graph, _ in self.graphs.values()), None)
        with (
            torch.cuda.stream(main_stream),  # also the current one again if the capture fails
            torch.cuda.graph(graph, pool, self.capture_stream, capture_error_mode="thread_local"),
        ):
            results = step()
        return graph, results


# A graph knows the addresses of its memory, so a model's decoder is kept from call to call.
CAPTURED_DECODERS: WeakKeyDictionary[PreTrainedModel, CapturedDecoder] = WeakKeyDictionary()


def captured_decoder_for(
    model: PreTrainedModel, max_rows: int, max_columns: int
) -> CapturedDecoder:
    """A decoder for batches of this size or of fewer sequences; the last one if it is large enough.

    Its KV cache takes at most an eighth of the GPU's memory, since it stays while the loss runs.
    Only a bfloat16 copy is captured: with float32 weights, autocast caches bfloat16 casts of them,
    and a graph would go on reading old ones.
    """
    earlier = CAPTURED_DECODERS.get(model)
    if earlier is not None:
        if earlier.max_rows >= max_rows and earlier.max_columns >= max_columns:
            return earlier
        max_rows = max(max_rows, earlier.max_rows)
        max_columns = max(max_columns, earlier.max_columns)
    layers, _ = run_prompts(model, [[0]])
    bytes_per_token = sum(keys.nbytes + values.nbytes for keys, values in layers)
    max_columns += -max_columns % CapturedDecoder.columns_per_block
    memory = torch.cuda.get_device_properties(model.device).total_memory
    num_fitting_rows = memory // 8 // (bytes_per_token * max_columns)
    max_rows = max(1, min(max_rows, num_fitting_rows))
    if earlier is None or (max_rows, max_columns) != (earlier.max_rows, earlier.max_columns):
        CAPTURED_DECODERS[model] = CapturedDecoder(model.device, max_rows, max_columns)
    return CAPTURED_DECODERS[model]
