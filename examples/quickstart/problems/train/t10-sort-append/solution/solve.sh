#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
sort plan.txt > score.txt
echo stone >> quote.txt
