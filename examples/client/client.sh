#!/usr/bin/env bash
# A client of the predictor's HTTP API, with curl alone: a whole answer, a stream, a cancel.
#
#     examples/client/client.sh whole  '{"prompt": "What is machine learning?"}'
#     examples/client/client.sh stream '{"prompt": "What is machine learning?"}'
#     examples/client/client.sh cancel '{"prompt": "What is machine learning?"}'
#
# The second argument has the inputs of docs/api.md; a third is the server's address. What the server
# sends is printed as it is: one JSON object, or server-sent events. The exit status is not 0 when the
# server refuses the request (422: an input is wrong; 409: all slots are taken).
set -euo pipefail

action=${1:-whole}
input=${2:-'{"prompt": "What is machine learning?"}'}
url=${3:-http://localhost:5000}

# Sends the inputs; takes further options of curl, and the path.
predict() {
    curl --silent --show-error --fail-with-body --no-buffer "${@:2}" "$url$1" \
        --header "Content-Type: application/json" --data "{\"input\": $input}"
}

whole() {
    predict /predictions
    echo
}

stream() {
    predict /predictions --header "Accept: text/event-stream"
}

# Starts a prediction under an id of its own, and cancels it by that id when its first text is here.
# (Closing the connection of a stream, as Ctrl-C does, stops the request as well.)
cancel() {
    local id=example-$RANDOM$RANDOM cancelled=no line
    predict "/predictions/$id" --request PUT --header "Accept: text/event-stream" |
        while IFS= read -r line; do
            printf '%s\n' "$line"
            if [[ $line == "event: output" && $cancelled == no ]]; then
                curl --silent --show-error --fail --output /dev/null \
                    --request POST "$url/predictions/$id/cancel"
                cancelled=yes
            fi
        done
}

case $action in
whole | stream | cancel) "$action" ;;
*)
    echo "usage: $0 whole|stream|cancel [INPUT] [URL]" >&2
    exit 2
    ;;
esac
