#include <errno.h>
#include "worker.h"
void file_watch(struct request *request) { worker_fail_with(ENOSYS, request->path); }
