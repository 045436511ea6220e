{{- /* Checks beyond the schema: each contradiction stops the installation with one line. */ -}}
{{- define "lambert.checks" -}}
{{- $v := .Values -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release is named %s: use lowercase letters, digits and -, with a letter first" .Release.Name) -}}
{{- end -}}
{{- $pod := printf "%s-node-0-%d-abcde" .Release.Name (sub (int $v.nodes) 1) -}}
{{- if gt (len $pod) 63 -}}
{{- fail (printf "the release's name is %d characters too long: shorten it, since pods would be named %s" (sub (len $pod) 63) $pod) -}}
{{- end -}}
{{- range $name, $value := $v.env -}}
{{- if or (hasPrefix "PET_" $name) (has $name (list "JOB_COMPLETION_INDEX" "RANK" "WORLD_SIZE" "LOCAL_RANK" "LOCAL_WORLD_SIZE" "MASTER_ADDR" "MASTER_PORT")) -}}
{{- fail (printf "env.%s: the chart sets a pod's place in the run: leave it out" $name) -}}
{{- end -}}
{{- if has $name (list "HOME" "TMPDIR" "TRITON_CACHE_DIR" "TORCH_EXTENSIONS_DIR" "MPLCONFIGDIR") -}}
{{- fail (printf "env.%s: the chart points it to a writable path: leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- if $v.dataPrep.enabled -}}
{{- include "lambert.checks.dataPrep" . -}}
{{- else -}}
{{- include "lambert.checks.run" . -}}
{{- include "lambert.checks.shards" . -}}
{{- include "lambert.checks.time" . -}}
{{- end -}}
{{- end }}

{{- define "lambert.checks.dataPrep" -}}
{{- $v := .Values -}}
{{- if not (or $v.dataPrep.repository $v.image.repository) -}}
{{- fail "dataPrep.repository is missing: name the image of docker/Dockerfile.cpu's target `prepare`" -}}
{{- end -}}
{{- if not $v.dataPrep.commands -}}
{{- fail "dataPrep.commands is empty: give the words after `python -m data_prep`, one list per command" -}}
{{- end -}}
{{- range $v.dataPrep.commands -}}
{{- if and (eq (first .) "vocab") (gt (len $v.dataPrep.commands) 1) -}}
{{- fail "dataPrep.commands: a restarted pod could not run vocab again, since its folder would exist: use a separate release for it" -}}
{{- end -}}
{{- if and (eq (first .) "vocab") (gt (int $v.dataPrep.pods) 1) -}}
{{- fail "dataPrep.pods is more than 1, but only one pod can run vocab: set dataPrep.pods to 1" -}}
{{- end -}}
{{- end -}}
{{- if and (contains "://" (toJson $v.dataPrep.commands)) $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- fail "dataPrep.commands contains an address, but networkPolicy.egress allows no outside connection: add a rule, or [{}] to allow all" -}}
{{- end -}}
{{- if not $v.data.claim -}}
{{- fail "data.claim is missing: name the PersistentVolumeClaim that shards are written to" -}}
{{- end -}}
{{- end }}

{{- define "lambert.checks.run" -}}
{{- $v := .Values -}}
{{- $run := include "lambert.given" . | fromYaml -}}
{{- if not $v.image.repository -}}
{{- fail "image.repository is missing: name the image of docker/Dockerfile" -}}
{{- end -}}
{{- if not (dig "run" "name" "" $run) -}}
{{- fail "run.run.name is missing: name the run" -}}
{{- end -}}
{{- if gt (float64 (dig "run" "seed" 1 $run)) 9007199254740992.0 -}}
{{- fail "run.run.seed is above 2^53, where Helm rounds numbers: choose a smaller seed" -}}
{{- end -}}
{{- $address := include "lambert.address" . -}}
{{- if and $address $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- fail (printf "run.run.folder is %s, but networkPolicy.egress allows no outside connection: add a rule, or [{}] to allow all" $address) -}}
{{- end -}}
{{- if and (gt (int $v.nodes) 1) (ne $v.runs.accessMode "ReadWriteMany") (not $v.runs.claim) (not $address) -}}
{{- fail (printf "runs.accessMode is %s, but nodes is %d: set it to ReadWriteMany, since all nodes write there" $v.runs.accessMode (int $v.nodes)) -}}
{{- end -}}
{{- if ge (int64 (include "lambert.mebibytes" $v.shm)) (int64 (include "lambert.mebibytes" $v.resources.memory)) -}}
{{- fail (printf "shm is %s, but counts against resources.memory, %s: lower shm or raise resources.memory" $v.shm $v.resources.memory) -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor $v.networkPolicy.enabled (not $v.networkPolicy.monitoringNamespace) -}}
{{- fail "monitoring.podMonitor is on, but networkPolicy.monitoringNamespace is null: set it to Prometheus' namespace" -}}
{{- end -}}
{{- end }}

{{- define "lambert.checks.shards" -}}
{{- $v := .Values -}}
{{- range include "lambert.shards" . | trim | splitList "\n" | compact -}}
{{- $place := index (splitList " " .) 0 -}}
{{- $path := trimPrefix (printf "%s " $place) . -}}
{{- if contains "://" $path -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- fail (printf "run.%s is %s, but networkPolicy.egress allows no outside connection: add a rule, or [{}] to allow all" $place $path) -}}
{{- end -}}
{{- else if not (hasPrefix (printf "%s/" $v.data.path) $path) -}}
{{- fail (printf "run.%s is %s: shards must be under data.path, %s, or at an address" $place $path $v.data.path) -}}
{{- else if not $v.data.claim -}}
{{- fail (printf "run.%s is %s, but data.claim is missing: name the PersistentVolumeClaim that holds it" $place $path) -}}
{{- end -}}
{{- end -}}
{{- $needed := divf (mulf (dig "cache" "gigabytes" 20 (include "lambert.given" . | fromYaml)) 1e9) 1048576 -}}
{{- if and (include "lambert.remote" .) (gt $needed (float64 (include "lambert.mebibytes" $v.shardCache))) -}}
{{- fail (printf "run.cache.gigabytes does not fit into shardCache, %s: lower it or raise shardCache" $v.shardCache) -}}
{{- end -}}
{{- end }}

{{- define "lambert.checks.time" -}}
{{- $v := .Values -}}
{{- if or (kindIs "invalid" $v.stepSeconds) (kindIs "invalid" $v.saveSeconds) -}}
{{- fail "stepSeconds and saveSeconds are missing: estimate the longest step and a complete save, so that a stop gets enough time" -}}
{{- end -}}
{{- if and (contains ".heldout " (include "lambert.shards" .)) (kindIs "invalid" $v.evaluationSeconds) -}}
{{- fail "evaluationSeconds is missing, but a phase has held-out shards: estimate a complete evaluation, so that a stop gets enough time" -}}
{{- end -}}
{{- $needed := int (include "lambert.grace" .) -}}
{{- if and $v.terminationGracePeriodSeconds (lt (int $v.terminationGracePeriodSeconds) $needed) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but a stop may take %d: raise it, or lower run.metrics.log_every_steps" (int $v.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- $every := dig "checkpoint" "every_steps" 1000 (include "lambert.given" . | fromYaml) -}}
{{- $lost := mulf $every $v.stepSeconds -}}
{{- if gt $lost (float64 $v.maxLostSeconds) -}}
{{- fail (printf "%v steps of run.checkpoint.every_steps take %v seconds, more than maxLostSeconds, %v: save more often" $every $lost $v.maxLostSeconds) -}}
{{- end -}}
{{- end }}
