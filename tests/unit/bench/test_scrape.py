from bench.scrape import run_scrape


def test_scrape_serves_every_device() -> None:
    report = run_scrape(devices=3, scrapes=2)
    assert (report.devices, report.scrapes) == (3, 2)
    assert 0 < report.median_s <= report.longest_s
    assert report.answer_bytes > 5000
