"""Run a script of the project on a pretended CUDA device: FOLDER SCRIPT flags ...

FOLDER holds the built device, whose library must be preloaded. At the end, counts of captured
graphs and of host synchronisations by stage are written to the file that FAKECUDA_REPORT names.
"""

import atexit
import itertools
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

folder, script, *flags = sys.argv[1:]
ROOT = Path(__file__).parent.parent
sys.path[0] = str((ROOT / script).parent)  # as python itself would have it
sys.path.insert(1, str(ROOT))
sys.path.insert(2, folder)

# It replaces functions of torch.cuda, so it comes before anything of the project.
import pretend  # noqa: E402
from torch import library  # noqa: E402

from grpo import packed  # noqa: E402
from grpo.timer import StageTimer  # noqa: E402

# The CPU, whose kernels compute here, has no attention of segments, and no product of bfloat16 with
# float32 results.
num_packed = itertools.count()


def attention_of_segments(*arguments):
    next(num_packed)
    return packed.sdpa_of_segments(*arguments)


packed.attention_of_segments = attention_of_segments
atexit.register(lambda: print(f"attentions of a packed row: {next(num_packed)}"))
products = library.Library("aten", "IMPL")
products.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CUDA")

time_stage = StageTimer.__call__


@contextmanager
def time_and_name_stage(timer, name):
    """A stage of the run, under whose name synchronisations are counted."""
    outer_stage = pretend.stage["now"]
    pretend.stage["now"] = name
    try:
        with time_stage(timer, name):
            yield
    finally:
        pretend.stage["now"] = outer_stage


StageTimer.__call__ = time_and_name_stage
atexit.register(pretend.report)
sys.argv = [script, *flags]
runpy.run_path(str(ROOT / script), run_name="__main__")
