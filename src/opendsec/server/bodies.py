"""JSON bodies in and out of Litestar handlers, through wire.codec and nothing else.

Installed once for a whole app: a handler's `data: CreateRequest` is decoded strictly (unknown fields are refused by
name), a returned dataclass is encoded the way every other part of OpenDSec encodes it. The OpenAPI schema stays
Litestar's own.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, TypeVar

from litestar.dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.typing import FieldDefinition

from opendsec.wire import codec

T = TypeVar("T")


class ModelBody(AbstractDTO[T]):
    """Every data and return type of ours."""

    def decode_bytes(self, value: bytes) -> Any:
        """Raises InvalidSpecError naming the field."""
        kind: Any = self.asgi_connection.route_handler.parsed_data_field.annotation
        return codec.decode(value, kind)

    def data_to_encodable_type(self, data: T | Collection[T]) -> bytes:
        """Encoded here, so Litestar passes it on as it is; bytes are an answer that is encoded already."""
        if isinstance(data, bytes):
            return data
        return codec.encode(data)

    @classmethod
    def is_supported_model_type_field(cls, field_definition: FieldDefinition) -> bool:
        return hasattr(field_definition.annotation, "__dataclass_fields__")

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Nothing to prepare: the dataclass itself is the schema."""

    @classmethod
    def create_openapi_schema(cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any) -> Any:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        return False
