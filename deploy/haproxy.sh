#!/bin/sh
# Ray's HAProxy, in two things not as Ray 2.60 starts it.

# No path is unknown, for the application has them all: what HAProxy cannot route is only early.
# Its 404 would tell a client to give up; this tells it when to try again.
previous=
for argument; do
    if [ "$previous" = -f ] && [ -w "$argument" ]; then
        sed -i 's|http-request return status 404 content-type text/plain lf-string "Path .*|http-request return status 503 content-type application/json string "{\\"error\\":{\\"message\\":\\"the application is starting\\",\\"type\\":\\"server_error\\",\\"param\\":null,\\"code\\":\\"overloaded\\"}}" hdr Retry-After 1|' "$argument"
    fi
    previous=$argument
done

# Without splicing (-dS). Ray switches splicing on, and with it HAProxy 2.8.25 misses that a client
# has left whose request came on a reused connection, headers and body apart: the request is
# computed to its end, and HAProxy spins on one core meanwhile.
exec "$SEEDANCE_HAPROXY" -dS "$@"
