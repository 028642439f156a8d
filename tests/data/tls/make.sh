#!/usr/bin/env bash
# The certificates of this directory, for tests alone: two authorities, a server's and a client's
# certificate of the first, a client's of the second. Valid for a hundred years.
set -euo pipefail
cd "$(dirname "$0")"
days=36500

authority() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $days \
    -subj "/CN=$1" -keyout "$1.key" -out "$1.pem"
}

certificate() { # name, authority, subject alternative names
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout "$1.key" -out "$1.csr"
  openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days $days \
    -extfile <(printf 'subjectAltName=%s' "$3") -out "$1.pem"
}

authority authority
authority stranger
certificate server authority "DNS:localhost,IP:127.0.0.1"
certificate client authority "DNS:client"
certificate impostor stranger "DNS:client"
rm -f -- *.csr *.srl authority.key stranger.key
