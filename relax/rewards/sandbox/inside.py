"""The first process of a box: takes jobs from its parent, forks a process for each, watches it, and cleans up after it.

    parent --- Setup, Job, Job ... (fd 0) ---> this --- fork ---> the program
           <-- {"ready"}, Ran, Ran ... (fd 1) -- this <-- output, exit --

It trusts nothing that comes from a program: it only counts bytes and reads exit codes. It ends with its parent.
"""

import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from relax.rewards.sandbox import filters, jobs, kernel, namespaces, program
from relax.rewards.sandbox.jobs import Job, Limits, Ran, Setup

TICK_S = 0.02  # how often memory and processes are counted
FIRST_UID = 1_000_000_000  # of programs started by root: far from all users' own, one for each box
ERROR_BYTES = 2000  # of standard error that are kept


def main() -> None:
    """Closes the box and works until the parent is gone."""
    control_in, control_out = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    raw = jobs.read(control_in)
    if raw is None:
        return
    setup = Setup(**raw)
    try:
        box = _enter(setup, control_in)
    except OSError as error:
        jobs.write(control_out, {"error": f"{error.filename or 'the kernel'}: {error.strerror}"})
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # programs of the same user cannot look into this process
    jobs.write(control_out, {"ready": True})
    while (raw := jobs.read(control_in)) is not None:
        try:
            answer: Ran | dict[str, str] = box.run(Job(**{**raw, "limits": Limits(**raw["limits"])}))
        except OSError as error:
            answer = {"error": f"{error.filename or 'the kernel'}: {error.strerror}"}
        jobs.write(control_out, answer)


def _enter(setup: Setup, control_in: int) -> "Inside":
    """Goes into the namespaces; the process that stays outside waits for the other, and never returns."""
    with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - no pathlib needed here; first to go when memory is short
        file.write("1000")
    if setup.level == "filters":
        if not kernel.is_known_machine():
            raise OSError(0, f"system calls of {kernel.MACHINE} are not known", "seccomp")
        if (version := filters.landlock_version()) < filters.LEAST_LANDLOCK:
            raise OSError(0, f"the kernel has version {version}, and {filters.LEAST_LANDLOCK} is needed", "Landlock")
        return Inside(setup, None, has_proc=False, control_in=control_in)
    uid = FIRST_UID + os.getpid() if namespaces.leave_the_others() else None
    pid = os.fork()
    if pid:
        os.close(control_in)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    has_proc = namespaces.build_root(setup.readable)
    return Inside(setup, uid, has_proc=has_proc, control_in=control_in)


class Inside:
    """Runs one job after the other."""

    def __init__(self, setup: Setup, uid: int | None, *, has_proc: bool, control_in: int) -> None:
        self._setup, self._uid, self._has_proc, self._control_in = setup, uid, has_proc, control_in
        self._is_first_process = setup.level == "namespaces"

    def run(self, job: Job) -> Ran:
        """The job's end: `Ran` whatever the program does. Raises `OSError` when the box itself fails."""
        limits = job.limits
        with self._folder(limits) as folder:
            cage = program.Cage(self._setup.level, self._uid, self._setup.readable, self._setup.packages, folder)
            stdin = os.memfd_create("stdin")
            _write_all(stdin, job.stdin.encode("utf-8", "surrogatepass"))
            os.lseek(stdin, 0, os.SEEK_SET)
            pipes = [os.pipe() for _ in range(3)]
            pid = os.fork()
            if pid == 0:
                program.run(job, cage, (stdin, pipes[0][1], pipes[1][1], pipes[2][1]))
            for fd in (stdin, *(write for _, write in pipes)):
                os.close(fd)
            heard = Heard(pipes[0][0], pipes[1][0], pipes[2][0], limits.max_output_bytes)
            try:
                why, is_late = self._watch(pid, limits, heard)
            finally:
                status = self._end_all(pid)
                heard.listen()
                heard.close()
        if not heard.done.startswith(program.CLOSED_IN):
            raise OSError(0, heard.last_error or "the program's process could not be closed in", "sandbox")
        if heard.is_too_much:
            return Ran(False, "", f"it wrote more than {limits.max_output_bytes} bytes")
        if why:
            return Ran(False, "", why, is_late)
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return Ran(False, "", f"it used more than {limits.cpu_s:g} s of the processor, or was killed", True)
        if status == 0 and (job.check is None or heard.done.endswith(program.PASSED)):
            return Ran(True, heard.output)
        return Ran(
            False, heard.output, heard.last_error or (f"it ended with {status}" if status else "it ended before its check")
        )

    @contextmanager
    def _folder(self, limits: Limits) -> Iterator[str]:
        if self._is_first_process:
            namespaces.fresh_folder(limits.disk_mib)
            try:
                yield namespaces.FOLDER
            finally:
                namespaces.drop_folder()
            return
        folder = tempfile.mkdtemp(prefix="relax-box-")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _watch(self, pid: int, limits: Limits, heard: "Heard") -> tuple[str, bool]:
        """Listens until the program ends or is past a limit. Returns which, or nothing, and whether it is that of time."""
        poller = select.poll()
        for fd in heard.fds:
            poller.register(fd, select.POLLIN)
        poller.register(self._control_in, 0)  # its end is told in any case
        ended_fd = os.pidfd_open(pid)
        poller.register(ended_fd, select.POLLIN)
        late_at = time.monotonic() + limits.wall_s
        try:
            while not heard.is_too_much:
                left_s = late_at - time.monotonic()
                if left_s <= 0:
                    return f"it ran for longer than {limits.wall_s:g} s", True
                events = poller.poll(min(left_s, TICK_S) * 1000)
                for fd in [fd for fd, event in events if event & select.POLLHUP and fd in heard.fds]:
                    poller.unregister(fd)
                heard.listen()
                if any(fd == self._control_in for fd, _ in events):
                    os._exit(1)  # nobody waits for the answer
                if any(fd == ended_fd for fd, _ in events):
                    break
                if why := self._over_limit(limits):
                    return why, False
        finally:
            os.close(ended_fd)
        return "", False

    def _over_limit(self, limits: Limits) -> str:
        """Which limit the program's processes are past together; nothing where `/proc` cannot tell."""
        if not self._has_proc:
            return ""
        pages, count = 0, 0
        for name in os.listdir("/proc"):  # noqa: PTH208 - no pathlib needed here
            if name.isdigit() and name != "1":
                count += 1
                try:
                    with open(f"/proc/{name}/statm") as file:  # noqa: PTH123
                        pages += int(file.read().split()[1])
                except (OSError, IndexError):
                    continue  # it has just ended
        if count > limits.max_processes:
            return f"it has more than {limits.max_processes} processes"
        if pages * os.sysconf("SC_PAGESIZE") > limits.memory_mib << 20:
            return f"it takes more than {limits.memory_mib} MiB"
        return ""

    def _end_all(self, pid: int) -> int:
        """Kills the program and all that it started, and waits for them. Returns the program's status, below 0 for a signal."""
        status = -int(signal.SIGKILL)
        while True:
            try:
                os.kill(-1 if self._is_first_process else pid, signal.SIGKILL)  # one that has ended keeps its status
            except ProcessLookupError:
                pass  # all have ended
            try:
                ended, raw = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            if ended == pid:
                status = os.waitstatus_to_exitcode(raw)
                if not self._is_first_process:
                    return status  # it could have no children, and its number is free from now on


class Heard:
    """What a program has written: standard output up to a bound, the end of standard error, and the marks of its process."""

    def __init__(self, out_fd: int, error_fd: int, done_fd: int, bound: int) -> None:
        self.fds, self._bound = (out_fd, error_fd, done_fd), bound
        self._texts = {fd: bytearray() for fd in self.fds}
        for fd in self.fds:
            os.set_blocking(fd, False)

    @property
    def is_too_much(self) -> bool:
        return len(self._texts[self.fds[0]]) > self._bound

    @property
    def output(self) -> str:
        return self._texts[self.fds[0]].decode("utf-8", "replace")

    @property
    def last_error(self) -> str:
        return self._texts[self.fds[1]].decode("utf-8", "replace").strip()

    @property
    def done(self) -> bytes:
        return bytes(self._texts[self.fds[2]])

    def listen(self) -> None:
        """Reads a piece of each, where there is one."""
        for fd, text in self._texts.items():
            for _ in range(16):  # a pipe's content, and no more: others wait
                try:
                    chunk = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not chunk:
                    break
                text += chunk
                if fd != self.fds[0]:
                    del text[:-ERROR_BYTES]
                elif self.is_too_much:
                    break

    def close(self) -> None:
        """Closes this side of the pipes."""
        for fd in self.fds:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main()
