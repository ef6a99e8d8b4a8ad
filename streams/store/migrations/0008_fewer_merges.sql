-- Of what a large cluster's store costs, merging parts is the largest piece: every row of these tables is written again at each level, and
-- with 5 parts to a merge (the default) a day has six levels or more. With 24 it has three or four; a query meets some dozens of small parts,
-- not a few. Parts under 100 MB are one file, not two or three for each of 70 columns.
ALTER TABLE host_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE process_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE nic_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE mesh_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE gpu_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE gpu_instance_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE port_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE rdma_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE pcie_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE board_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE machine_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE nvme_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE mount_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE other_ticks MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE steps MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE host_1m MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE process_1m MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE nic_1m MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
ALTER TABLE steps_1m MODIFY SETTING merge_selector_base = 24, min_bytes_for_wide_part = 104857600;
