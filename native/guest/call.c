#include "call.h"
#include "conn.h"
bool call_begin(const struct header *header, char *payload){(void)payload; error_send(header->id,"unsupported",0,"files"); return true;}
bool call_frame(const struct header *header, char *payload){(void)header,(void)payload; return true;}
void call_drop_all(void){}
