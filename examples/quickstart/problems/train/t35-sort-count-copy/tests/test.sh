#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Sort quote.txt into draft.txt.
is draft.txt 'earth
honey
river' && points=$((points + 6))
# Count the lines of sketch.txt into plan.txt.
is plan.txt '6' && points=$((points + 6))
# Copy score.txt to story.txt.
is story.txt 'candy grape
daisy metal' && points=$((points + 3))
is story.txt 'candy grape
daisy metal' && is score.txt 'candy grape
daisy metal' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
