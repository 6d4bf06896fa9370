"""`client.keys`: API keys and projects of the platform, for whoever has an admin key."""

from __future__ import annotations

from opendsec.client._async.transport import Transport, target
from opendsec.errors import InvalidSpecError
from opendsec.model.access import KeyRecord, NewKey, Project, Role
from opendsec.wire.contracts import MAX_JSON_BODY, KeyList, KeyRequest, ProjectList, ProjectRequest


class Keys:
    """API keys and projects. Every call raises ForbiddenError unless the client's own key is an admin's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self, role: Role | str, *, project: str | None = None, title: str = "") -> NewKey:
        """Make a key; the answer is the only place its secret is told.

        `role`: `runner` starts and uses sandboxes, `builder` also makes images and snapshots, `admin` also keys.
        `project`: None: the client's own. `title`: for people, up to 200 characters.

        Raises NotFoundError (no such project), InvalidSpecError.
        """
        try:
            wanted = KeyRequest(project=project, role=Role(role), title=title)
        except ValueError:
            raise InvalidSpecError(
                f"role: {str(role)[:40]!r} is not of {', '.join(Role)}", detail={"field": "role"}
            ) from None
        return await self._transport.call("POST", target("keys"), NewKey, value=wanted, idempotent=False)

    async def list(self) -> tuple[KeyRecord, ...]:
        """All keys of all projects, oldest first, without secrets."""
        return (await self._transport.call("GET", target("keys"), KeyList)).items

    async def revoke(self, key_id: str) -> None:
        """The key stops working at once, with other apiservers within 5 s; requests under way are answered.

        Raises NotFoundError.
        """
        deadline = self._transport.deadline(None)
        body = await self._transport.open("DELETE", target("keys", key_id), deadline=deadline)
        await body.read_all(MAX_JSON_BODY, deadline=deadline)

    async def projects(self) -> tuple[Project, ...]:
        """By name."""
        return (await self._transport.call("GET", target("projects"), ProjectList)).items

    async def create_project(self, name: str) -> Project:
        """1 to 63 lower-case letters, digits and inner dashes. Raises ConflictError when it is there, and
        InvalidSpecError.
        """
        wanted = ProjectRequest(name=name)
        return await self._transport.call("POST", target("projects"), Project, value=wanted, idempotent=False)
