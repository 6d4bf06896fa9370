/* See wire.h. Nothing here allocates; every length is checked before it is used. */
#include "wire.h"

#include <string.h>

uint64_t get_u64(const char *bytes) {
    uint64_t value;
    memcpy(&value, bytes, 8);
    return value;
}

uint32_t get_u32(const char *bytes) {
    uint32_t value;
    memcpy(&value, bytes, 4);
    return value;
}

void put_u64(char *bytes, uint64_t value) { memcpy(bytes, &value, 8); }

void put_u32(char *bytes, uint32_t value) { memcpy(bytes, &value, 4); }

bool header_parse(const unsigned char *bytes, uint32_t max, struct header *header) {
    memcpy(&header->length, bytes, 4);
    memcpy(&header->id, bytes + 4, 4);
    header->type = bytes[8];
    header->flags = bytes[9];
    return bytes[10] == 0 && bytes[11] == 0 && header->length <= max;
}

void header_write(unsigned char *bytes, const struct header *header) {
    memcpy(bytes, &header->length, 4);
    memcpy(bytes + 4, &header->id, 4);
    bytes[8] = header->type;
    bytes[9] = header->flags;
    bytes[10] = bytes[11] = 0;
}

bool field_next(struct cursor *cursor, struct field *field) {
    if (cursor->bad || cursor->at == cursor->end) return false;
    size_t left = (size_t)(cursor->end - cursor->at);
    if (left < FIELD_BYTES) {
        cursor->bad = true;
        return false;
    }
    uint16_t zero;
    memcpy(&field->tag, cursor->at, 2);
    memcpy(&zero, cursor->at + 2, 2);
    field->length = get_u32(cursor->at + 4);
    if (zero || field->length > left - FIELD_BYTES) {
        cursor->bad = true;
        return false;
    }
    field->data = cursor->at + FIELD_BYTES;
    cursor->at = field->data + field->length;
    return true;
}

bool field_u64(struct cursor *cursor, const struct field *field, uint64_t *value) {
    if (field->length != 8) {
        cursor->bad = true;
        return false;
    }
    *value = get_u64(field->data);
    return true;
}

void write_bytes(struct writer *writer, enum tag tag, const void *data, size_t length) {
    if (writer->room - writer->length < FIELD_BYTES || length > writer->room - writer->length - FIELD_BYTES) {
        writer->full = true;
        return;
    }
    char *at = writer->bytes + writer->length;
    uint16_t number = (uint16_t)tag, zero = 0;
    memcpy(at, &number, 2);
    memcpy(at + 2, &zero, 2);
    put_u32(at + 4, (uint32_t)length);
    if (length) memcpy(at + FIELD_BYTES, data, length);
    writer->length += FIELD_BYTES + length;
}

void write_text(struct writer *writer, enum tag tag, const char *text) { write_bytes(writer, tag, text, strlen(text)); }

void write_u64(struct writer *writer, enum tag tag, uint64_t value) { write_bytes(writer, tag, &value, 8); }
