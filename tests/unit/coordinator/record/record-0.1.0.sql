BEGIN TRANSACTION;
CREATE TABLE quarantines (
	id INTEGER NOT NULL, 
	run VARCHAR NOT NULL, 
	device VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	until_round INTEGER, 
	reason VARCHAR NOT NULL, 
	at VARCHAR NOT NULL, 
	released_at VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "quarantines" VALUES(1,'old','b',1,2,'1 strike','2026-11-22T16:26:34.596+00:00',NULL);
CREATE TABLE refusals (
	id INTEGER NOT NULL, 
	run VARCHAR NOT NULL, 
	round INTEGER, 
	device VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	at VARCHAR NOT NULL, 
	broke VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "refusals" VALUES(1,'old',2,'b','train','too much memory','2026-11-22T16:26:34.572+00:00','memory');
CREATE TABLE results (
	run VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	device VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	samples INTEGER NOT NULL, 
	metrics JSON NOT NULL, 
	use JSON NOT NULL, 
	upload VARCHAR, 
	received_at VARCHAR NOT NULL, 
	used_in INTEGER, 
	PRIMARY KEY (run, round, device, kind)
);
INSERT INTO "results" VALUES('old',1,'a','train',10,'{"loss": 1.0}','{"train_s": null, "step_s": 0.01, "steps": 0, "flops": 100, "peak_rss_bytes": 100000000, "received_bytes": 1000000, "sent_bytes": 5, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}','blake3:5555555555555555555555555555555555555555555555555555555555555555','2026-11-22T16:26:34.498+00:00',NULL);
INSERT INTO "results" VALUES('old',1,'b','train',10,'{"loss": 1.0}','{"train_s": null, "step_s": 0.02, "steps": 0, "flops": 100, "peak_rss_bytes": 100000000, "received_bytes": 1000000, "sent_bytes": 5, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}','blake3:5555555555555555555555555555555555555555555555555555555555555555','2026-11-22T16:26:34.510+00:00',NULL);
INSERT INTO "results" VALUES('old',1,'a','evaluate',10,'{"correct": 7.0}','{"train_s": null, "step_s": null, "steps": 0, "flops": null, "peak_rss_bytes": null, "received_bytes": null, "sent_bytes": 1, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}',NULL,'2026-11-22T16:26:34.520+00:00',NULL);
INSERT INTO "results" VALUES('old',1,'b','evaluate',5,'{"correct": 1.0}','{"train_s": null, "step_s": null, "steps": 0, "flops": null, "peak_rss_bytes": null, "received_bytes": null, "sent_bytes": 1, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}',NULL,'2026-11-22T16:26:34.521+00:00',NULL);
INSERT INTO "results" VALUES('old',2,'a','train',10,'{"loss": 0.5}','{"train_s": null, "step_s": 0.01, "steps": 0, "flops": 100, "peak_rss_bytes": 100000000, "received_bytes": 1000000, "sent_bytes": 5, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}','blake3:5555555555555555555555555555555555555555555555555555555555555555','2026-11-22T16:26:34.531+00:00',NULL);
INSERT INTO "results" VALUES('old',2,'b','train',10,'{"loss": 0.5}','{"train_s": null, "step_s": 0.02, "steps": 0, "flops": 100, "peak_rss_bytes": 100000000, "received_bytes": 1000000, "sent_bytes": 5, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}','blake3:5555555555555555555555555555555555555555555555555555555555555555','2026-11-22T16:26:34.541+00:00',3);
INSERT INTO "results" VALUES('old',2,'a','evaluate',10,'{"correct": 8.0}','{"train_s": null, "step_s": null, "steps": 0, "flops": null, "peak_rss_bytes": null, "received_bytes": null, "sent_bytes": 1, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}',NULL,'2026-11-22T16:26:34.543+00:00',NULL);
INSERT INTO "results" VALUES('old',2,'b','evaluate',5,'{"correct": 1.0}','{"train_s": null, "step_s": null, "steps": 0, "flops": null, "peak_rss_bytes": null, "received_bytes": null, "sent_bytes": 1, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}',NULL,'2026-11-22T16:26:34.557+00:00',NULL);
INSERT INTO "results" VALUES('old',3,'a','train',10,'{"loss": 0.3333333333333333}','{"train_s": null, "step_s": 0.01, "steps": 0, "flops": 100, "peak_rss_bytes": 100000000, "received_bytes": 1000000, "sent_bytes": 5, "fetched_bytes": null, "upload_bytes": null, "sustained": null, "energy_j": null, "energy_source": null, "temperature_c": null, "throttled": null, "broke": []}','blake3:5555555555555555555555555555555555555555555555555555555555555555','2026-11-22T16:26:34.568+00:00',NULL);
CREATE TABLE rounds (
	run VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	cohort JSON NOT NULL, 
	opened_at VARCHAR NOT NULL, 
	closed_at VARCHAR, 
	evaluated BOOLEAN NOT NULL, 
	state JSON, 
	figures JSON, 
	expected JSON, 
	needed INTEGER, 
	PRIMARY KEY (run, round), 
	FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "rounds" VALUES('old',1,'["a", "b"]','2026-11-22T16:26:34.487+00:00','2026-11-22T16:26:34.516+00:00',1,'{"groups": {"model": "blake3:0000000000000000000000000000000000000000000000000000000000000001"}, "memory": null, "uploads": {}, "references": {}}','{"cohort": 2.0, "devices_s": 1.5, "server_s": 0.5}','{"a": {"prediction": {"device": "a", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}, "b": {"prediction": {"device": "b", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}}',2);
INSERT INTO "rounds" VALUES('old',2,'["a", "b"]','2026-11-22T16:26:34.525+00:00','2026-11-22T16:26:34.542+00:00',1,'{"groups": {"model": "blake3:0000000000000000000000000000000000000000000000000000000000000002"}, "memory": null, "uploads": {}, "references": {}}','{"cohort": 2.0, "devices_s": 1.5, "server_s": 0.5}','{"a": {"prediction": {"device": "a", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}, "b": {"prediction": {"device": "b", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}}',2);
INSERT INTO "rounds" VALUES('old',3,'["a", "b"]','2026-11-22T16:26:34.560+00:00',NULL,0,NULL,NULL,'{"a": {"prediction": {"device": "a", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}, "b": {"prediction": {"device": "b", "source": "measured", "mode": null, "step_s": 0.25, "train_s": 12.5, "evaluate_s": null, "bound": "memory", "memory": [{"phase": "train", "parts": {"software": 87000000}}], "peak_rss_bytes": 87000000, "energy_j": null, "power_w": null, "over": []}, "flops": 1000000000, "bytes_down": 3, "bytes_up": 4, "budget": {"memory_bytes": 1000000000}, "changes": {}, "kept": 1.0}}',2);
CREATE TABLE runs (
	id VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	status VARCHAR NOT NULL, 
	config JSON NOT NULL, 
	classes JSON, 
	program VARCHAR, 
	protocol VARCHAR, 
	reason VARCHAR, 
	corrections JSON, 
	PRIMARY KEY (id)
);
INSERT INTO "runs" VALUES('old','2026-11-22T16:26:34.472+00:00','running','{"method": "fedavg", "model": "vit_small_images", "rounds": 4, "seed": 7}','["ant", "bee"]','blake3:5555555555555555555555555555555555555555555555555555555555555555','tested as the planner said',NULL,'{"a": {"memory": 1.5}}');
CREATE TABLE strikes (
	id INTEGER NOT NULL, 
	run VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	device VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	at VARCHAR NOT NULL, 
	spent BOOLEAN NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "strikes" VALUES(1,'old',1,'b','NaN','2026-11-22T16:26:34.574+00:00',1);
CREATE TABLE tasks (
	run VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	device VARCHAR NOT NULL, 
	program VARCHAR NOT NULL, 
	groups JSON NOT NULL, 
	asked_at VARCHAR NOT NULL, 
	outcome VARCHAR, 
	PRIMARY KEY (run, round, device)
);
INSERT INTO "tasks" VALUES('old',1,'a','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.492+00:00','accepted');
INSERT INTO "tasks" VALUES('old',1,'b','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.492+00:00','accepted');
INSERT INTO "tasks" VALUES('old',2,'a','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.529+00:00','accepted');
INSERT INTO "tasks" VALUES('old',2,'b','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.529+00:00','accepted');
INSERT INTO "tasks" VALUES('old',3,'a','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.561+00:00','accepted');
INSERT INTO "tasks" VALUES('old',3,'b','blake3:5555555555555555555555555555555555555555555555555555555555555555','{"model": "blake3:5555555555555555555555555555555555555555555555555555555555555555"}','2026-11-22T16:26:34.561+00:00',NULL);
COMMIT;
