"""Names of users and groups as numbers, by an image's own /etc/passwd and /etc/group. Pure.

A user alone brings the group passwd says; a number alone is user and group.
"""

from __future__ import annotations

from opendsec.build.items import Owner
from opendsec.errors import InvalidSpecError

_MAX_ID = 2**32 - 2


def needs_accounts(text: str) -> bool:
    """Whether there is a name in it."""
    return not all(part.isdigit() for part in text.split(":"))


def resolve_owner(text: str, *, passwd: str, group: str, where: str) -> Owner:
    """`user`, `user:group`. Raises InvalidSpecError when a name is unknown."""
    user, colon, group_name = text.partition(":")
    uid, gid = _user(user, passwd, where)
    if colon:
        gid = _number(group_name, group, 2, f"{where}: the image has no group {group_name!r}")
    return Owner(uid=uid, gid=gid)


def _user(user: str, passwd: str, where: str) -> tuple[int, int]:
    if user.isdigit():
        number = _checked(int(user), where)
        return number, number
    for fields in _lines(passwd):
        if fields[0] == user and len(fields) > 3 and fields[2].isdigit() and fields[3].isdigit():
            return int(fields[2]), int(fields[3])
    raise _unknown(f"{where}: the image has no user {user!r}")


def _number(name: str, accounts: str, column: int, why: str) -> int:
    if name.isdigit():
        return _checked(int(name), why)
    for fields in _lines(accounts):
        if fields[0] == name and len(fields) > column and fields[column].isdigit():
            return int(fields[column])
    raise _unknown(why)


def _lines(text: str) -> list[list[str]]:
    return [line.split(":") for line in text.splitlines() if line and not line.startswith("#")]


def _checked(number: int, where: str) -> int:
    if number > _MAX_ID:
        raise _unknown(f"{where}: {number} is no number of a user or group")
    return number


def _unknown(why: str) -> InvalidSpecError:
    return InvalidSpecError(why, detail={"field": "chown"}, remedy="use a number, or make the account first")
