{{- /* The run's configuration as given: a mapping, or the text of a file. */ -}}
{{- define "lambert.given" -}}
{{- $run := .Values.run -}}
{{- if kindIs "string" $run -}}
{{- $run = fromYaml $run -}}
{{- if hasKey $run "Error" -}}
{{- fail (printf "run is not valid YAML: %s" (get $run "Error" | replace "\n" " ")) -}}
{{- end -}}
{{- end -}}
{{- if not $run -}}
{{- fail "run is empty: give the run's configuration, for example --set-file run=run.yaml" -}}
{{- end -}}
{{- range list "run" "metrics" "checkpoint" "cache" -}}
{{- if and (hasKey $run .) (not (kindIs "map" (get $run .))) -}}
{{- fail (printf "run.%s is not a mapping: give it keys, or leave it out" .) -}}
{{- end -}}
{{- end -}}
{{- range kindIs "slice" $run.phases | ternary $run.phases list | default (list nil) -}}
{{- if not (kindIs "map" .) -}}
{{- fail "run.phases is not a list of phases: give at least one phase, each a mapping" -}}
{{- end -}}
{{- end -}}
{{- toYaml $run -}}
{{- end }}

{{- /* The configuration with the chart's own values added. A given value that conflicts stops the installation. */ -}}
{{- define "lambert.config" -}}
{{- $run := include "lambert.given" . | fromYaml -}}
{{- $path := .Values.runs.path -}}
{{- $folder := dig "run" "folder" "" $run | default (printf "%s/%s" $path (dig "run" "name" "" $run)) -}}
{{- $inside := hasPrefix (printf "%s/" $path) $folder -}}
{{- if or (not (or $inside (include "lambert.address" .))) (contains ".." $folder) -}}
{{- fail (printf "run.run.folder is %s: it must be an address or under runs.path, %s, or be left out" $folder $path) -}}
{{- end -}}
{{- $device := ternary "cuda" "cpu" (gt (int .Values.gpus) 0) -}}
{{- $given := dig "run" "device" "auto" $run -}}
{{- if not (has $given (list "auto" $device)) -}}
{{- fail (printf "run.run.device is %s, but gpus is %d: leave run.run.device out or change gpus" $given (int .Values.gpus)) -}}
{{- end -}}
{{- $port := dig "metrics" "port" .Values.metricsPort $run -}}
{{- if or (kindIs "invalid" $port) (ne (toString $port) (toString .Values.metricsPort)) -}}
{{- fail (printf "run.metrics.port is %v, but metricsPort is %d: leave run.metrics.port out or change metricsPort" $port (int .Values.metricsPort)) -}}
{{- end -}}
{{- $ranks := mul .Values.nodes (include "lambert.ranks" (dict "root" .)) -}}
{{- $given = dig "run" "ranks" $ranks $run -}}
{{- if ne (toString $given) (toString $ranks) -}}
{{- fail (printf "run.run.ranks is %v, but nodes × ranks per node is %d: leave run.run.ranks out or change nodes or gpus" $given $ranks) -}}
{{- end -}}
{{- $set := dict "run" (dict "folder" $folder "device" $device "ranks" $ranks) "metrics" (dict "port" .Values.metricsPort) -}}
{{- if include "lambert.cached" . -}}
{{- $set = set $set "cache" (dict "folder" "/shards") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $run $set) -}}
{{- end }}

{{- /* The shards of all phases, one per line: "phases.0.train /data/train-128". */ -}}
{{- define "lambert.shards" -}}
{{- range $number, $phase := (include "lambert.given" . | fromYaml).phases -}}
{{- range $key := list "train" "heldout" -}}
{{- with get $phase $key -}}
{{ printf "phases.%d.%s %s\n" $number $key . }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Not empty if any shards are at an address. */ -}}
{{- define "lambert.remote" -}}
{{- if contains "://" (include "lambert.shards" .) }}yes{{ end -}}
{{- end }}

{{- /* The address of the run's folder; empty if the run is on a claim. */ -}}
{{- define "lambert.address" -}}
{{- $folder := dig "run" "folder" "" (include "lambert.given" . | fromYaml) -}}
{{- if contains "://" $folder }}{{ $folder }}{{ end -}}
{{- end }}

{{- /* Not empty if the node's disk holds shards from addresses, or a run that is at one. */ -}}
{{- define "lambert.cached" -}}
{{ include "lambert.remote" . }}{{ include "lambert.address" . }}
{{- end }}

{{- /* Seconds that a stop can take: twice the time until ranks check for a stop, evaluate and save; then the last scrape. */ -}}
{{- define "lambert.grace" -}}
{{- $metrics := dig "metrics" (dict) (include "lambert.given" . | fromYaml) -}}
{{- $steps := mulf (dig "log_every_steps" 10 $metrics) .Values.stepSeconds -}}
{{- $stop := addf (mulf 2 (addf $steps .Values.saveSeconds (.Values.evaluationSeconds | default 0))) (dig "linger_seconds" 20 $metrics) -}}
{{ add 15 (ceil $stop) }}
{{- end }}
