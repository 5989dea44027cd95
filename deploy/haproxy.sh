#!/bin/sh
# Ray's HAProxy, in some things not as Ray 2.60 starts it.

# Clients that vanish without a word: TCP asks those that are silent, and the ingress is told who
# is at the other end of HAProxy, to see whether what it sends is acknowledged
# (app/websocket_protocol.py). No `tcp-ut`: it also ends clients that are only slow to read.
watch_clients() {
    sed -i '/^frontend http_frontend/,/^ *bind / {
        /^ *bind /a\    http-request set-header x-seedance-peer "%[src] %[src_port] %[dst] %[dst_port]"
    }' "$1"
    [ "${SEEDANCE_KEEPALIVE_IDLE_S:-1}" = 0 ] || sed -i "/^defaults/a\\
    option clitcpka\\
    clitcpka-idle ${SEEDANCE_KEEPALIVE_IDLE_S:-1}s\\
    clitcpka-intvl ${SEEDANCE_KEEPALIVE_INTERVAL_S:-1}s\\
    clitcpka-cnt ${SEEDANCE_KEEPALIVE_PROBES:-3}" "$1"
}

# A client that does not read: without a bound the kernel takes 4 MB for it on each side of HAProxy,
# which is a thousand answers that nobody reads, before the ingress notices.
bound_buffers() {
    sed -i '/^global/a\    tune.sndbuf.client 65536\n    tune.rcvbuf.server 65536' "$1"
}

# No path is unknown, for the application has them all: what HAProxy cannot route is only early.
# Its 404 would tell a client to give up; this tells it when to try again.
previous=
for argument; do
    if [ "$previous" = -f ] && [ -w "$argument" ]; then
        sed -i 's|http-request return status 404 content-type text/plain lf-string "Path .*|http-request return status 503 content-type application/json string "{\\"error\\":{\\"message\\":\\"the application is starting\\",\\"type\\":\\"server_error\\",\\"param\\":null,\\"code\\":\\"overloaded\\"}}" hdr Retry-After 1|' "$argument"
        grep -q x-seedance-peer "$argument" || watch_clients "$argument"
        grep -q tune.sndbuf.client "$argument" || bound_buffers "$argument"
    fi
    previous=$argument
done

# Without splicing (-dS). Ray switches splicing on, and with it HAProxy 2.8.25 misses that a client
# has left whose request came on a reused connection, headers and body apart: the request is
# computed to its end, and HAProxy spins on one core meanwhile.
exec "$SEEDANCE_HAPROXY" -dS "$@"
