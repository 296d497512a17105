#!/bin/sh
# Makes what auth.yaml needs, once: a credential for each user, the broker's rules, an authority of its own, and the
# broker's certificate. Each service finds its own credential in its own volume, and nobody else's.
set -eu
all=/keys/all
chmod 700 "$all"
kvbus auth init --instances a,b --requesters gateway,stage --observers watch --dir "$all"

if [ ! -f "$all/ca.pem" ]; then
  new_key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
  # shellcheck disable=SC2086 # options, split on purpose
  openssl req -x509 $new_key -days 3650 -subj "/CN=kvbus stories" -keyout "$all/ca.key" -out "$all/ca.pem" 2>/dev/null
  # shellcheck disable=SC2086
  openssl req $new_key -subj "/CN=nats" -keyout "$all/nats.key" -out "$all/nats.csr" 2>/dev/null
  printf 'subjectAltName=DNS:nats\n' >"$all/nats.ext"
  openssl x509 -req -in "$all/nats.csr" -CA "$all/ca.pem" -CAkey "$all/ca.key" -CAcreateserial -days 3650 \
    -extfile "$all/nats.ext" -out "$all/nats.pem" 2>/dev/null
fi

install -m 0444 "$all/auth.conf" "$all/nats.pem" /keys/nats/
install -m 0400 "$all/nats.key" /keys/nats/
hand_out() { # volume, credential
  install -m 0444 "$all/ca.pem" "/keys/$1/"
  install -o kvbus -g kvbus -m 0400 "$all/$2.cred" "/keys/$1/own.cred"
}
hand_out a instance-a
hand_out b instance-b
hand_out gateway requester-gateway
hand_out stage requester-stage
hand_out watch observer-watch
hand_out operator operator
