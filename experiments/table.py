"""best: the rate of the run that is best on validation at its end, of several seeds 0."""
import json, sys
from pathlib import Path

def best(paths):
    ends = {}
    for path in map(Path, paths):
        rate = json.loads((path / "args.json").read_text())["args"]["learning_rate"]
        ends[rate] = json.loads((path / "eval_log.jsonl").read_text().splitlines()[-1])["accuracy"]
    rate = max(sorted(ends), key=ends.get)
    print(next(Path(p).name.split("_rate")[1].split("_")[0] for p in paths if float(Path(p).name.split("_rate")[1].split("_")[0]) == rate))

if __name__ == "__main__":
    assert sys.argv[1] == "best"
    best(sys.argv[2:])
