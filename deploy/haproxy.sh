#!/bin/sh
# Ray's HAProxy without splicing (-dS). Ray 2.60 switches splicing on, and with it HAProxy 2.8.25
# misses that a client has left whose request came on a reused connection, headers and body apart:
# the request is computed to its end, and HAProxy spins on one core meanwhile.
exec "$SEEDANCE_HAPROXY" -dS "$@"
