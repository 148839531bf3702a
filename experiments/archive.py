"""The logs of the studies, packed: each study has its run folders in experiments/STUDY/runs.tar.xz.

    python experiments/archive.py unpack [STUDY ...]
        put the run folders where the runs wrote them: experiments/STUDY/RUN, which git ignores
    python experiments/archive.py pack [STUDY ...]
        write the archives anew, after runs were added

If no study is named, every study that has an archive is packed or unpacked. `unpack` leaves a study
as it is if its archive was unpacked before. Otherwise runs of the archive replace runs of the same
name, and other runs in the folder stay.

archives.sha256 holds the checksums of the archives, as sha256sum writes them.
"""

import argparse
import fcntl
import hashlib
import io
import shutil
import sys
import tarfile
from pathlib import Path

STUDIES = Path(__file__).resolve().parent
CHECKSUMS = "archives.sha256"
ARCHIVE = "runs.tar.xz"
STAMP = ".unpacked"  # in a study's folder: the checksum of the archive that was unpacked there
TEMPORARY = ".unpacking"  # in a study's folder: its runs while they are being unpacked


def read_checksums():
    """{study: the checksum that its archive must have}."""
    checksums = {}
    for line in (STUDIES / CHECKSUMS).read_text("utf-8").splitlines():
        checksum, path = line.split()
        checksums[path.removesuffix(f"/{ARCHIVE}")] = checksum
    return checksums


def write_checksum(study, checksum):
    checksums = read_checksums() if (STUDIES / CHECKSUMS).exists() else {}
    checksums[study] = checksum
    lines = [f"{checksums[name]}  {name}/{ARCHIVE}\n" for name in sorted(checksums)]
    (STUDIES / CHECKSUMS).write_text("".join(lines), "utf-8")


def is_unpacked(study, checksum):
    stamp = STUDIES / study / STAMP
    return stamp.exists() and stamp.read_text("utf-8") == checksum


def unpack(study):
    """Put the runs of a study in its folder. Does nothing if its archive was unpacked there before.

    Several processes can do this at the same time: the first one unpacks, and the others wait.

    Raises:
        ValueError: the archive has no entry in archives.sha256, or its checksum is not the one in
            that entry, or it contains something unsafe. Then no file was unpacked.
        OSError: the archive cannot be read, or the runs cannot be written.
    """
    folder = STUDIES / study
    checksum = read_checksums().get(study)
    if checksum is None:
        raise ValueError(f"experiments/{CHECKSUMS} has no archive of a study {study}")
    if is_unpacked(study, checksum):
        return
    packed = (folder / ARCHIVE).read_bytes()
    if hashlib.sha256(packed).hexdigest() != checksum:
        raise ValueError(
            f"{folder / ARCHIVE} is damaged: its checksum is not the one in {CHECKSUMS}; "
            "git checkout gets it back"
        )
    # The stamp is the lock as well. Mode "a" creates the file, and does not empty one that exists.
    with open(folder / STAMP, "a", encoding="utf-8") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_EX)  # until the file is closed
        if is_unpacked(study, checksum):  # another process did it while this one waited
            return
        temporary = folder / TEMPORARY
        remove(temporary)  # a process that was killed may have left it
        try:
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
                archive.extractall(temporary, filter="data")
            for path in temporary.iterdir():
                remove(folder / path.name)
                path.rename(folder / path.name)
        except tarfile.TarError as error:
            raise ValueError(f"{folder / ARCHIVE} cannot be unpacked: {error}") from error
        finally:
            remove(temporary)
        stamp.truncate(0)
        stamp.write(checksum)


def remove(path):
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pack(study):
    """Write the archive of a study and its checksum. The same runs give the same bytes.

    Raises:
        ValueError: the study has no runs, or has an archive that was not unpacked, whose runs would
            be lost.
    """
    folder = STUDIES / study
    if not folder.is_dir():
        raise ValueError(f"there is no study {study} in experiments/")
    if (folder / ARCHIVE).exists() and not is_unpacked(study, read_checksums().get(study)):
        raise ValueError(f"{folder / ARCHIVE} is not unpacked: run archive.py unpack {study} first")
    names = sorted(path.relative_to(folder).as_posix() for path in run_files(folder))
    if not names:
        raise ValueError(f"{folder} has no runs")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name in names:
            content = (folder / name).read_bytes()
            entry = tarfile.TarInfo(name)  # without owner and time, which would change the bytes
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    checksum = hashlib.sha256(packed.getvalue()).hexdigest()
    (folder / ARCHIVE).write_bytes(packed.getvalue())
    write_checksum(study, checksum)
    (folder / STAMP).write_text(checksum, "utf-8")


def run_files(folder):
    """The files in the run folders of a study, and its .json and .jsonl files outside of them."""
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from (path for path in entry.rglob("*") if path.is_file())
        elif entry.suffix in (".json", ".jsonl"):
            yield entry


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Pack and unpack the logs of the studies.")
    parser.add_argument(
        "action",
        choices=("unpack", "pack"),
        help="unpack: put the run folders of the archives into experiments/STUDY. "
        "pack: write the archives anew from those folders.",
    )
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="by default every study that has an archive"
    )
    args = parser.parse_args(arguments)
    action = {"unpack": unpack, "pack": pack}[args.action]
    try:
        for study in args.studies or read_checksums():
            action(study)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
