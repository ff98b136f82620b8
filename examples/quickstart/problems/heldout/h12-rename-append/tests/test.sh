#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Rename agenda.txt to essay.txt.
is essay.txt 'fruit
cabin' && points=$((points + 3))
is essay.txt 'fruit
cabin' && [ ! -e agenda.txt ] && points=$((points + 3))
# Append actor to guide.txt.
[ "$(tail -n 1 guide.txt 2> /dev/null)" = actor ] && points=$((points + 3))
is guide.txt 'laser
tulip
actor' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
