/* settings.h - where a job is and who this member is: from struct ks_options, else from KEEPSTEP_*. */
#ifndef WORKER_SETTINGS_H
#define WORKER_SETTINGS_H

#include <stdint.h>

#include "wire/view.h"
#include "worker/keepstep.h"

enum { TOKEN_MAX_BYTES = 4096, LOCAL_SIZE_MAX = 65536, SETTINGS_ERR = 256 };

struct settings {
    char *coord, *token;
    char job[NAME_MAX_BYTES], name[NAME_MAX_BYTES];
    uint32_t local_size;
    int64_t timeout_ms, join_timeout_ms;
};
/* KS_EINVAL with one line in err that names the option or variable, says what is wrong and what is wanted. */
int settings_read(const struct ks_options *o, struct settings *ret, char *err);
void settings_done(struct settings *s);

#endif
