/* addr.h - "host:port" and "[v6]:port". */
#ifndef NET_ADDR_H
#define NET_ADDR_H

#include <sys/socket.h>

#include "wire/doc.h"

/* Splits text into host and port (both of ADDR_MAX_BYTES). KS_EINVAL with a line in err. */
int addr_split(const char *text, char *ret_host, char *ret_port, char *err);
/* Writes the address as text (ADDR_MAX_BYTES). */
void addr_format(const struct sockaddr *sa, socklen_t size, char *out);

#endif
