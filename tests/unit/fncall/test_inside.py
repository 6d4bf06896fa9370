"""What the host and the image's Python must agree on."""

from __future__ import annotations

import array
import ast
import os
import sys

from opendsec.fncall import box, inside, inside_frames, zygote


def test_both_sides_have_the_same_frames() -> None:
    assert inside.REQUEST.format == inside_frames.REQUEST.format
    assert inside.REPLY.format == inside_frames.REPLY.format
    assert (inside.ASK_KILLS, inside.ASK_SWEEP) == (inside_frames.ASK_KILLS, inside_frames.ASK_SWEEP)
    assert inside.UNPREPARED == inside_frames.UNPREPARED
    assert (inside.WORK, inside.USER_ID) == (box.WORK, box.USER_ID)


def test_an_old_python_can_run_it() -> None:
    """An image's may be of 2018: no newer grammar, nothing but the standard library."""
    tree = ast.parse(zygote.SOURCE, feature_version=(3, 7))
    modules = {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert modules <= set(sys.stdlib_module_names)
    assert len(zygote.SOURCE.encode()) < 128 * 1024, "one argument of execve"


def test_what_a_call_makes_lies_in_new_pages() -> None:
    """Of each class of small objects, what is made next is in a pool in which nothing else lies."""
    kept = inside.fill_holes()
    first_of_pool = [made for made in kept if id(made) & inside.POOL_MASK == inside.POOL_HEADER]
    assert len({made.__sizeof__() // 16 for made in first_of_pool}) >= 28
    assert len(kept) < 32 * inside.MOST_HOLES


def test_what_fails_before_the_code_runs_is_not_the_codes_fault() -> None:
    """Here there is no directory of a call; elsewhere it may be a limit of the host."""
    task, (told, err) = os.memfd_create("task"), os.pipe()
    asked = b'{"code": "", "function": "f", "arguments": [[], {}], "env": {}}'
    os.write(task, asked)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            spare = os.open(os.devnull, os.O_RDWR)
            status = inside.make_life(spare)(array.array("i", (task, os.dup(1), err)), len(asked), 1)
        finally:
            os._exit(status)
    os.close(err)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == inside.UNPREPARED
    assert os.pread(task, len(asked) + 1, 0) == asked
    assert b"Error" in os.read(told, 1000)
    os.close(task)
    os.close(told)
