#include <errno.h>
#include "worker.h"
void file_pack(struct request *request) { worker_fail_with(ENOSYS, request->path); }
