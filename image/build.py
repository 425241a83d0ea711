"""Makes an image: a table of steps, each a generator that yields how much of itself is done.

    <images>/<flavour>-<digest>/     a finished image: it appears by one rename, its bytes on disk
    <images>/.cache/root-<flavour>-<digest>/   the root file system of a recipe, so that a new boxd needs no new packages
    <images>/.cache/debs/            packages that an interrupted build had downloaded
    <images>/.scratch/               the running build; whoever builds next removes what is left of it
    <images>/.lock                   held by the build and by every program it starts: an orphan cannot write into the next one's scratch

The steps block; callers put `build` into a thread. Whatever `progress` raises ends the build as an interruption does.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shlex
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

from image import initramfs, mirror, recipe
from image.boxd.protocol import REVISION
from image.recipe import FLAVOURS, Flavour, Settings
from image.store import ImageNotFoundError, ImageStore, StoredImage

Progress = Callable[[str, float], None]  # what is being done, and how much of the whole build is done (0..1); at least once a second or two

LOG_LINES = 40  # kept for the error
ROOT_AGE = 7 * 86_400.0  # seconds that a cached root is used: later Debian has security updates


class BuildError(Exception):
    """A step failed; nothing of the build is left but what the next one can use. `log`: the last lines of the step's programs."""

    def __init__(self, step: str, message: str, log: Sequence[str] = ()) -> None:
        super().__init__(f"{step}: {message}")
        self.step, self.log = step, tuple(log)


@dataclass(frozen=True)
class Estimate:
    minutes: int
    gigabytes: float


@dataclass
class Work:
    """One build: its places, its inputs, and the log of the step that runs."""

    images: Path
    flavour: Flavour
    settings: Settings
    patience: float = 10.0  # seconds to wait for the lock: a killed build's programs take a moment to end
    lock: int = -1  # descriptor, inherited by the programs
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def digest(self) -> str:
        return current_digest(self.flavour.name, self.settings)

    @property
    def scratch(self) -> Path:
        return self.images / ".scratch"

    @property
    def out(self) -> Path:
        return self.scratch / "image"

    @property
    def debs(self) -> Path:
        return self.images / ".cache" / "debs"

    @property
    def root(self) -> Path:
        return self.images / ".cache" / f"root-{self.flavour.name}-{recipe.root_digest(self.flavour, self.settings)[:12]}"

    @property
    def kernel(self) -> str:
        return max(path.name for path in (self.root / "usr/lib/modules").iterdir())


@dataclass(frozen=True)
class Step:
    name: str
    title: str  # for the progress bar
    weight: float  # about its seconds
    run: Callable[[Work], Iterator[float]]


def estimate(flavour: str) -> Estimate:
    return Estimate(FLAVOURS[flavour].minutes, FLAVOURS[flavour].gigabytes)


def current_digest(flavour: str, settings: Settings) -> str:
    """The digest that an image of this recipe has: `ImageStore.find(flavour, prefer=...)`."""
    return recipe.image_digest(FLAVOURS[flavour], settings, initramfs.SCRIPT.encode())


def build(images: Path, flavour: str, settings: Settings, progress: Progress) -> StoredImage:
    """The image of the current recipe, made when it is not there yet. Needs root. Raises BuildError; KeyError for an unknown flavour.

    An interrupted build (also by an exception of `progress`) goes on from the packages it had downloaded, or from the finished root.
    """
    work = Work(images, FLAVOURS[flavour], settings)
    return run(work, STEPS, progress)


def run(work: Work, steps: Sequence[Step], progress: Progress) -> StoredImage:
    """Runs `steps` in a scratch folder that is gone afterwards, however this ends."""
    store = ImageStore(work.images)
    with _locked(work):
        try:
            return store.show(work.digest)
        except ImageNotFoundError:
            pass
        _remove_scratch(work)
        work.out.mkdir(parents=True)
        try:
            whole, done = sum(step.weight for step in steps), 0.0
            for step in steps:
                progress(step.title, done / whole)
                work.log.clear()
                for part in _errors_named(step, work):
                    progress(step.title, (done + step.weight * part) / whole)
                done += step.weight
        finally:
            _remove_scratch(work)
        progress("Done", 1.0)
        return store.show(work.digest)


def _errors_named(step: Step, work: Work) -> Iterator[float]:
    try:
        yield from step.run(work)
    except subprocess.CalledProcessError as error:
        program = error.cmd[0]
        raise BuildError(step.name, f"{program} ended with {error.returncode}", work.log) from error
    except (OSError, LookupError, mirror.NoMirrorError) as error:
        raise BuildError(step.name, str(error), work.log) from error


# ---- the steps


def check_host(work: Work) -> Iterator[float]:
    if os.geteuid() != 0:
        raise PermissionError("an image is built by root: it holds device nodes and files of several owners")
    needed, free = work.flavour.gigabytes, shutil.disk_usage(work.images).free / 1e9
    if free < needed:
        raise OSError(f"needs {needed:.0f} GB in {work.images}, {free:.1f} GB are free")
    yield 1.0


def install_packages(work: Work) -> Iterator[float]:
    """Debian's packages, the plain files and the set-up commands become the cached root."""
    if work.root.exists() and time.time() - work.root.stat().st_mtime < ROOT_AGE:
        return
    root, sources = work.scratch / "root", work.scratch / "sources.list"
    sources.write_text(mirror.of_host().sources(recipe.SUITE))
    work.debs.mkdir(parents=True, exist_ok=True)
    yield from _bootstrap(work, root, sources)
    for name, path in recipe.files_of(work.flavour):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)  # it may be a link out of the root
        shutil.copyfile(path, root / name)
        (root / name).chmod(0o644)
    _unpack_powershell(work, root)
    for command in recipe.SETUP:
        for _ in program_output(work, ["chroot", str(root), *command]):
            yield 0.99
    os.sync()  # the root's many files, before a name promises that they are there
    _make_way(work)
    os.utime(root)
    root.rename(work.root)
    shutil.rmtree(work.debs)


def _bootstrap(work: Work, root: Path, sources: Path) -> Iterator[float]:
    keep = f'mkdir -p "$1/var/cache/apt/archives" && cp -al {shlex.quote(str(work.debs))}/. "$1/var/cache/apt/archives/"'
    command = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--verbose",
        "--skip=essential/unlink,cleanup/apt,download/empty",  # packages stay, for a build that is interrupted later on
        f"--setup-hook={keep}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.WITHOUT),
        *(f"--dpkgopt=path-include={pattern}" for pattern in recipe.WITHIN),
        f"--include={','.join(work.flavour.packages)}",
        recipe.SUITE, str(root), str(sources),
    ]  # fmt: skip
    events, expected = 0, 3 * work.flavour.installed  # each package is fetched, unpacked and set up
    for line in program_output(work, command):
        events += line.startswith(("Get:", "Unpacking ", "Setting up "))
        yield min(0.98, events / expected)


def _unpack_powershell(work: Work, root: Path) -> None:
    if not (source := work.settings.powershell_source):
        return
    if source.endswith(".deb"):
        subprocess.run(["dpkg-deb", "--extract", source, root], check=True)
        return
    folder = root / "opt/microsoft/powershell/7"
    folder.mkdir(parents=True)
    subprocess.run(["tar", "--extract", "--file", source, "--directory", folder, "--no-same-owner"], check=True)
    (folder / "pwsh").chmod(0o755)
    (root / "usr/bin/pwsh").symlink_to("/opt/microsoft/powershell/7/pwsh")


def install_boxd(work: Work) -> Iterator[float]:
    target = work.root / "usr/lib/python3/dist-packages/boxd"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(recipe.BOXD, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    yield 0.5
    compile_all = ["chroot", str(work.root), "python3", "-m", "compileall", "-q", "/" + str(target.relative_to(work.root))]
    yield from (0.9 for _ in program_output(work, compile_all))


def make_initramfs(work: Work) -> Iterator[float]:
    (work.out / "initrd").write_bytes(initramfs.build(work.root, work.kernel, recipe.MODULES, recipe.ROOT_LABEL))
    shutil.copyfile(work.root / f"boot/vmlinuz-{work.kernel}", work.out / "vmlinuz")
    yield 1.0


def make_disk(work: Work) -> Iterator[float]:
    disk = work.out / "disk.raw"
    disk.touch()
    os.truncate(disk, work.flavour.disk)
    expected = 1 + sum(entry.lstat().st_blocks * 512 for entry in work.root.rglob("*"))
    # A new sparse file is zeroed: saying so spares the guest the background writing of empty inode tables.
    options = ["-L", recipe.ROOT_LABEL, "-m", "1", "-E", "assume_storage_prezeroed=1"]
    for _ in program_output(work, ["mkfs.ext4", "-F", "-q", *options, "-d", str(work.root), str(disk)]):
        yield min(1.0, disk.stat().st_blocks * 512 / expected)


def publish(work: Work) -> Iterator[float]:
    disk, kernel, initrd = (work.out / name for name in ("disk.raw", "vmlinuz", "initrd"))
    sizes = {"disk": disk.stat().st_size, "disk_allocated": disk.stat().st_blocks * 512}
    sizes |= {"kernel": kernel.stat().st_size, "initrd": initrd.stat().st_size}
    query = ["dpkg-query", f"--admindir={work.root}/var/lib/dpkg", "--show", "--showformat", "${Package} ${Version}\n"]
    listed = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    manifest = {
        "flavour": work.flavour.name,
        "digest": work.digest,
        "built_at": time.time(),
        "suite": recipe.SUITE,
        "kernel": work.kernel,
        "boxd": REVISION,
        "sizes": sizes,
        "powershell": bool(work.settings.powershell_source),
        "packages": dict(line.split(" ", 1) for line in listed),
    }
    (work.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for path in (disk, kernel, initrd, work.out / "manifest.json", work.out):
        _fsync(path)
        yield 0.5
    final = work.images / f"{work.flavour.name}-{work.digest}"
    if final.exists():
        shutil.rmtree(final)  # it has no readable manifest, else this build would not run
    work.out.rename(final)
    _fsync(work.images)


STEPS = (
    Step("host", "Checking this host", 1, check_host),
    Step("packages", "Installing Debian packages", 80, install_packages),
    Step("boxd", "Installing boxd", 1, install_boxd),
    Step("initramfs", "Making the initramfs", 1, make_initramfs),
    Step("disk", "Writing the disk", 12, make_disk),
    Step("publish", "Making it durable", 5, publish),
)


# ---- what the steps share


def program_output(work: Work, command: list[str]) -> Iterator[str]:
    """The lines that a program writes, and an empty one for each second in which it writes none. It never outlives this generator.

    The program runs in namespaces of its own and gets SIGKILL when this thread ends: its children and mounts are gone with it.
    """
    apart = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--", *command]
    environment = os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "SYSTEMD_OFFLINE": "1"}
    environment["INITRD"] = "No"  # the kernel package's hook makes none: ours is smaller
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as log, selectors.DefaultSelector() as selector:
        try:
            process = subprocess.Popen(
                apart, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment, pass_fds=[work.lock]
            )
        finally:
            os.close(theirs)
        with process:
            try:
                selector.register(log, selectors.EVENT_READ)
                yield from _lines(log, selector, work.log)
            except BaseException:
                process.kill()
                while selector.select(timeout=10.0) and log.read(65536):
                    pass  # the log ends with the last of the program's children
                raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _lines(log: RawIOBase, selector: selectors.BaseSelector, kept: deque[str]) -> Iterator[str]:
    rest = b""
    while True:
        if not selector.select(timeout=1.0):
            yield ""
            continue
        chunk = log.read(65536) or b""
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines if chunk or not rest else [rest]:
            kept.append(line.decode(errors="replace"))
            yield kept[-1]
        if not chunk:
            return


@contextmanager
def _locked(work: Work) -> Iterator[None]:
    work.images.mkdir(parents=True, exist_ok=True)
    with (work.images / ".lock").open("a") as file:
        deadline = time.monotonic() + work.patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("lock", f"another build is running in {work.images}") from None
                time.sleep(0.2)
        work.lock = file.fileno()
        try:
            yield
        finally:
            work.lock = -1


def _remove_scratch(work: Work) -> None:
    """Downloaded packages are kept for the next build, the rest goes."""
    archives = work.scratch / "root/var/cache/apt/archives"
    if archives.is_dir() and work.debs.is_dir():
        for package in archives.glob("*.deb"):
            package.replace(work.debs / package.name)
    if work.scratch.exists():
        shutil.rmtree(work.scratch)


def _make_way(work: Work) -> None:
    """One cached root a flavour: the one before is of no more use."""
    for old in work.root.parent.glob(f"root-{work.flavour.name}-*"):
        shutil.rmtree(old)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
