#!/bin/sh
# Make the secret and the certificates of a fleet in the working folder, once: a CA, one certificate for the engines whose
# names are given, and one for fronts. The key of the CA is thrown away: for other names, empty the folder.
set -eu
umask 077
[ -e front.pem ] && exit 0
make_key() { openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc "$@"; }
sign() { openssl x509 -req -in request -CA ca.pem -CAkey /tmp/ca.key -days 3650 -extfile names -out "$1"; }
names=""
for name in "$@"; do names="$names${names:+,}DNS:$name"; done
openssl rand -hex 32 >secret
make_key -x509 -days 3650 -subj /CN=tiercel-fleet -keyout /tmp/ca.key -out ca.pem
make_key -subj /CN=engine -keyout engine.key -out request
echo "subjectAltName=$names" >names
sign engine.pem
make_key -subj /CN=front -keyout front.key -out request
echo "subjectAltName=DNS:front" >names
sign front.pem
rm -f /tmp/ca.key request names
