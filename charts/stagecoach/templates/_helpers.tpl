{{- define "stagecoach.labels" -}}
app.kubernetes.io/name: stagecoach
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: "{{ .Chart.Name }}-{{ .Chart.Version }}"
{{- end }}

{{- /* Labels that select the pods of a component. Use it as (list . "component"). */}}
{{- define "stagecoach.selector" -}}
app.kubernetes.io/name: stagecoach
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* Name of objects that belong to no namespace. A colon is allowed there, and in no other name. */}}
{{- /* Identifies the release in labels of functions' pods. */}}
{{- define "stagecoach.installation" -}}
{{ printf "%s.%s" .Release.Name .Release.Namespace | trunc 63 | trimSuffix "-" | trimSuffix "." }}
{{- end }}

{{- define "stagecoach.clusterName" -}}
stagecoach:{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end }}

{{- define "stagecoach.image" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,42}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "release name %q: want at most 44 lower-case letters, digits and hyphens, and a letter first; names of pods begin with it" .Release.Name) -}}
{{- end -}}
{{- $repository := required "image.repository: say where `make images-push` has put the image, and its tag in image.tag" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* Whole seconds of a duration such as 1m30s, and a second for the rest. */}}
{{- define "stagecoach.seconds" -}}
{{- $sum := 1.0 -}}
{{- range regexFindAll "[0-9.]+(ms|s|m|h)" (toString .) -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $sum = addf $sum (mulf (trimSuffix $unit . | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit)) -}}
{{- end -}}
{{ int (floor $sum) }}
{{- end }}

{{- /* Fails if a pod would be killed before it has ended by itself. Use it as
       (list "value with the time" time "value with the grace period" grace needed). */}}
{{- define "stagecoach.grace" -}}
{{- if gt (int (index . 4)) (int (index . 3)) -}}
{{- fail (printf "%s: %v: set %s to at least %d, it is %d; pods are killed after that time" (index . 0) (index . 1) (index . 2) (int (index . 4)) (int (index . 3))) -}}
{{- end -}}
{{ index . 3 }}
{{- end }}

{{- define "stagecoach.clusterKey" -}}
{{ .Values.cluster.existingSecret | default (printf "%s-cluster-key" .Release.Name) }}
{{- end }}

{{- define "stagecoach.natsHosts" -}}
{{- $hosts := list -}}
{{- range $i := until (int .Values.nats.replicas) -}}
{{- $hosts = append $hosts (printf "%s-nats-%d.%s-nats.%s.svc.%s" $.Release.Name $i $.Release.Name $.Release.Namespace $.Values.kubernetesDNSDomain) -}}
{{- end -}}
{{ join "," $hosts }}
{{- end }}

{{- define "stagecoach.natsURLs" -}}
{{- if .Values.nats.external.enabled -}}
{{- if not .Values.cluster.existingSecret -}}
{{- fail "cluster.existingSecret: nats.external needs the Secret with the cluster.key of these servers" -}}
{{- end -}}
{{ join "," .Values.nats.external.urls }}
{{- else -}}
{{- $urls := list -}}
{{- range splitList "," (include "stagecoach.natsHosts" .) -}}
{{- $urls = append $urls (printf "nats://%s:4222" .) -}}
{{- end -}}
{{ join "," $urls }}
{{- end -}}
{{- end }}

{{- /* Ports of the NATS servers outside. */}}
{{- define "stagecoach.natsPorts" -}}
{{- $ports := list -}}
{{- range .Values.nats.external.urls -}}
{{- $port := regexFind ":[0-9]+/?$" . | trimPrefix ":" | trimSuffix "/" | default "4222" -}}
{{- $ports = append $ports (printf "{port: %s}" $port) -}}
{{- end -}}
[{{ uniq $ports | join ", " }}]
{{- end }}

{{- /* Security of all pods but those of the DaemonSet: Pod Security "restricted". */}}
{{- define "stagecoach.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "stagecoach.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "stagecoach.keep" -}}
{{- if eq .Values.dataPolicy "keep" }}
helm.sh/resource-policy: keep
{{- end }}
{{- end }}

{{- /* On which machines pods run, but those of the DaemonSet. */}}
{{- define "stagecoach.machines" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Where pods of a component run. Use it as (list . "component"). */}}
{{- define "stagecoach.placement" -}}
{{- $top := index . 0 -}}
{{- include "stagecoach.machines" $top }}
{{- if $top.Values.affinity }}
affinity: {{- toYaml $top.Values.affinity | nindent 2 }}
{{- else if ne $top.Values.antiAffinity "none" }}
affinity:
  podAntiAffinity:
  {{- if eq $top.Values.antiAffinity "hard" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "stagecoach.selector" . | nindent 12 }}
  {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "stagecoach.selector" . | nindent 14 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* A claim of a StatefulSet. Use it as (list . "name" persistence). */}}
{{- define "stagecoach.claim" -}}
{{- $p := index . 2 -}}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: {{ if eq (index . 0).Values.dataPolicy "keep" }}Retain{{ else }}Delete{{ end }}
  whenScaled: Retain
{{- if $p.enabled }}
volumeClaimTemplates:
  - metadata:
      name: {{ index . 1 }} # no labels with versions: an upgrade must not change this
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $p.storageClass }}
      storageClassName: {{ . | quote }}
      {{- end }}
      resources:
        requests:
          storage: {{ $p.size | quote }}
{{- end }}
{{- end }}

{{- define "stagecoach.registryVolume" -}}
{{- with .Values.registry.secret -}}
- name: registry
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: .dockerconfigjson, path: config.json}]
{{- end -}}
{{- end }}

{{- define "stagecoach.capabilities" -}}
CHOWN, DAC_OVERRIDE, KILL, NET_ADMIN, NET_BIND_SERVICE, SETGID, SETPCAP, SETUID, SYS_ADMIN, SYS_CHROOT{{ if eq .Values.keysManager.runtime "pod" }}, SYS_PTRACE{{ end }}
{{- end }}
