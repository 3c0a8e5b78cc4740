# A node: containerd, kubelet and kube-proxy. Its environment: BIN, RUN, DIR, IP, SERVER, NAME,
# NUMBER, NODES, CGROUP, KUBECONFIG, SERVER_IP.
mount --make-rshared /
for at in /var/lib/kubelet /run/containerd /run/netns /var/lib/cni /var/log/containers /var/log/pods; do
  mkdir -p "$at"
  mount -t tmpfs tmpfs "$at"
done
ip route add default via "$SERVER_IP"
for i in $(seq "$NODES"); do
  if [ "$i" != "$NUMBER" ]; then ip route add "10.244.$i.0/24" via "10.98.0.$((i + 1))"; fi
done
echo 1 >/proc/sys/net/ipv4/ip_forward
for at in /sys/fs/cgroup/*/; do
  mkdir -p "$at$CGROUP/$NAME"
  for file in cpuset.cpus cpuset.mems; do
    if [ -e "$at$file" ]; then
      for below in "$CGROUP" "$CGROUP/$NAME"; do cat "$at$file" >"$at$below/$file"; done
    fi
  done
done
containerd --config containerd.toml >containerd.log 2>&1 &
"$BIN/kube-proxy" --config proxy.yaml --hostname-override="$NAME" >proxy.log 2>&1 &
until [ -S c.sock ]; do sleep 0.02; done
"$BIN/kubelet" --kubeconfig="$KUBECONFIG" --config=kubelet.yaml --root-dir=/var/lib/kubelet \
  --cert-dir=pki --hostname-override="$NAME" --node-ip="$IP" --v=2 >kubelet.log 2>&1 &
wait
