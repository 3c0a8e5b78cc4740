{{- /* What control planes keep in Kubernetes for functions: "secrets", "objects", "optIn". */}}
{{- define "stagecoach.kept" -}}
{{- $pods := eq .Values.keysManager.runtime "pod" -}}
{{- $kept := list -}}
{{- $values := .Values.kubernetes | default dict }}{{- /* helm upgrade --reuse-values may lack it */ -}}
{{- if or $pods $values.secrets }}{{ $kept = append $kept "secrets" }}{{ end -}}
{{- if $pods }}{{ $kept = append $kept "objects" }}{{ end -}}
{{- if $values.optIn }}{{ $kept = append $kept "optIn" }}{{ end -}}
{{- if and $pods (has .Release.Namespace .Values.keysManager.podNamespaces) -}}
{{- fail (printf "keysManager.podNamespaces: want namespaces other than the release's (%s): a daemon may make pods there" .Release.Namespace) -}}
{{- end -}}
{{- if and $kept (not (has .Values.functionNamespace .Values.keysManager.podNamespaces)) -}}
{{- fail (printf "keysManager.podNamespaces: want functionNamespace (%s) too" .Values.functionNamespace) -}}
{{- end -}}
{{ join "," $kept }}
{{- end }}

{{- /* Arguments of control planes. */}}
{{- define "stagecoach.keptArgs" -}}
{{- $kept := include "stagecoach.kept" . -}}
{{- if $kept -}}
- --kube-namespaces={{ join "," .Values.keysManager.podNamespaces }}
{{- if contains "secrets" $kept }}
- --kube-secrets
{{- end }}
{{- if contains "objects" $kept }}
- --kube-objects
{{- end }}
{{- if contains "optIn" $kept }}
- --kube-opt-in
{{- end }}
{{- end -}}
{{- end }}
