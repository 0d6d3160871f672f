#include "net/addr.h"

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keepstep_err.h"

static int bad(const char *text, const char *why, char *err)
{
    snprintf(err, ERR_TEXT, "address \"%.128s\": %s; wanted is host:port", text, why);
    return KS_EINVAL;
}

int addr_split(const char *text, char *ret_host, char *ret_port, char *err)
{
    const char *host = text;
    const char *colon = strrchr(text, ':');
    if (!colon || strlen(text) >= ADDR_MAX_BYTES)
        return bad(text, colon ? "too long" : "no port", err);
    size_t n = (size_t)(colon - text);
    if (text[0] == '[') {
        if (n < 3 || text[n - 1] != ']')
            return bad(text, "no ']' before the port", err);
        host = text + 1;
        n -= 2;
    } else if (memchr(text, ':', n)) {
        return bad(text, "IPv6 addresses need brackets", err);
    }
    if (n == 0)
        return bad(text, "no host", err);
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end || port > 65535)
        return bad(text, "the port is not a number up to 65535", err);
    memcpy(ret_host, host, n);
    ret_host[n] = 0;
    snprintf(ret_port, ADDR_MAX_BYTES, "%lu", port);
    return 0;
}

void addr_format(const struct sockaddr *sa, socklen_t size, char *out)
{
    char host[80], port[8];
    if (getnameinfo(sa, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV)) {
        snprintf(out, ADDR_MAX_BYTES, "?");
        return;
    }
    snprintf(out, ADDR_MAX_BYTES, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}
