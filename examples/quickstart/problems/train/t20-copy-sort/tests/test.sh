#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Copy index.txt to score.txt.
is score.txt 'amber sugar
honey' && points=$((points + 3))
is score.txt 'amber sugar
honey' && is index.txt 'amber sugar
honey' && points=$((points + 3))
# Sort quote.txt into names.txt.
is names.txt 'ocean
sugar
video' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
