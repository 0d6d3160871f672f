#include "coord/coord.h"

#include <stdio.h>
#include <string.h>

#include "base/keepstep_err.h"
#include "coord/coord_event.h"

int coord_open(const struct coord_config *c, struct coord **ret, char *err)
{
    if (coord_job_check(c->job, err))
        return KS_EINVAL;
    if (c->url && strncmp(c->url, "local:", 6) == 0 && c->url[6])
        return coord_local_open(c, c->url + 6, ret, err);
    if (c->url && strncmp(c->url, "etcd:", 5) == 0 && c->url[5])
        return coord_etcd_open(c, c->url + 5, ret, err);
    snprintf(err, COORD_ERR_TEXT,
             "coordination store \"%.120s\": give local:DIR, or etcd:http://HOST:PORT[,https://HOST:PORT...]",
             c->url ? c->url : "");
    return KS_EINVAL;
}
