#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort quote.txt > draft.txt
wc -l < sketch.txt > plan.txt
cp score.txt story.txt
